//! SELinux labels of directories in which programs in containers make sockets, like device plugins and CSI drivers. The
//! policy of the node lets containers write nowhere else.

use std::io;
use std::path::Path;

use rustix::fs::XattrFlags;

/// A file that exists where SELinux is in use, enforcing or not.
const ENFORCE: &str = "/sys/fs/selinux/enforce";
/// Label of what containers may write. Upstream: `config.KubeletContainersSharedSELinuxLabel`.
const OF_CONTAINERS: &str = "system_u:object_r:container_file_t:s0";
const ATTRIBUTE: &str = "security.selinux";

/// Lets containers make files in a directory, where SELinux is in use. A failure is a warning, as upstream: the directory
/// may be labelled well enough. Blocking, shortly.
pub fn label_for_containers(dir: &Path) {
    let set = |dir: &Path, label: &[u8]| {
        rustix::fs::setxattr(dir, ATTRIBUTE, label, XattrFlags::empty()).map_err(io::Error::from)
    };
    if let Err(error) = label(dir, Path::new(ENFORCE), set) {
        tracing::warn!(
            path = %dir.display(), %error,
            "cannot give a directory the SELinux label {OF_CONTAINERS}, plugins in containers may be refused to make sockets in it"
        );
    }
}

fn label(
    dir: &Path,
    enforce: &Path,
    set: impl Fn(&Path, &[u8]) -> io::Result<()>,
) -> io::Result<()> {
    if !enforce.exists() {
        return Ok(());
    }
    // The kernel keeps labels with the byte that ends them.
    set(dir, format!("{OF_CONTAINERS}\0").as_bytes())
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use super::*;

    #[test]
    fn a_label_is_set_where_selinux_is_in_use_and_nowhere_else() {
        let dir = tempfile::tempdir().unwrap();
        let enforce = dir.path().join("enforce");
        let labels = RefCell::new(Vec::new());
        let set = |dir: &Path, label: &[u8]| {
            labels.borrow_mut().push((dir.to_owned(), label.to_vec()));
            Ok(())
        };
        label(dir.path(), &enforce, set).unwrap();
        assert!(labels.borrow().is_empty());
        std::fs::write(&enforce, "0").unwrap();
        label(dir.path(), &enforce, set).unwrap();
        let label_of_files = b"system_u:object_r:container_file_t:s0\0".to_vec();
        assert_eq!(*labels.borrow(), [(dir.path().to_owned(), label_of_files)]);
        let refuse = |_: &Path, _: &[u8]| Err(io::Error::other("refused"));
        assert!(label(dir.path(), &enforce, refuse).is_err());
    }
}
