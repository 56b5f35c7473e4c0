//! Keeps the memory of this process out of core files: it holds secrets of pods, tokens and keys.
//!
//! The limit of core files counts for the programs that the agent starts too. The kernel ignores it where `core_pattern`
//! pipes cores to a program, so this process is made not dumpable as well. That gives its files in `/proc` to root, and
//! debuggers need `CAP_SYS_PTRACE`; `exec` makes a child dumpable again.

use nix::errno::Errno;
use nix::sys::prctl;
use nix::sys::resource::{Resource, setrlimit};

/// Rules out core files of this process, and limits those of its children to nothing. Cannot be undone without privileges.
///
/// # Errors
/// When the kernel, or a filter of system calls, refuses.
pub(super) fn forbid() -> Result<(), Errno> {
    prctl::set_dumpable(false)?;
    setrlimit(Resource::RLIMIT_CORE, 0, 0)
}

#[cfg(test)]
mod tests {
    use nix::sys::resource::getrlimit;

    use super::*;

    #[test]
    fn neither_this_process_nor_its_children_leave_core_files() {
        forbid().unwrap();
        assert_eq!(prctl::get_dumpable(), Ok(false));
        assert_eq!(getrlimit(Resource::RLIMIT_CORE), Ok((0, 0)));
        let limits = std::process::Command::new("sh")
            .args(["-c", "ulimit -Sc; ulimit -Hc"])
            .output()
            .unwrap();
        assert_eq!(String::from_utf8_lossy(&limits.stdout), "0\n0\n");
    }
}
