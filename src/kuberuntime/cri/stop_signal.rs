//! Signals that stop containers, as the CRI numbers them: `runtime.v1.Signal`, which the generated types lack.

/// Names in the order of the CRI's numbers, from 1. The numbers are the CRI's own, not those of a kernel.
const NAMES: [&str; 34] = [
    "SIGABRT",
    "SIGALRM",
    "SIGBUS",
    "SIGCHLD",
    "SIGCLD",
    "SIGCONT",
    "SIGFPE",
    "SIGHUP",
    "SIGILL",
    "SIGINT",
    "SIGIO",
    "SIGIOT",
    "SIGKILL",
    "SIGPIPE",
    "SIGPOLL",
    "SIGPROF",
    "SIGPWR",
    "SIGQUIT",
    "SIGSEGV",
    "SIGSTKFLT",
    "SIGSTOP",
    "SIGSYS",
    "SIGTERM",
    "SIGTRAP",
    "SIGTSTP",
    "SIGTTIN",
    "SIGTTOU",
    "SIGURG",
    "SIGUSR1",
    "SIGUSR2",
    "SIGVTALRM",
    "SIGWINCH",
    "SIGXCPU",
    "SIGXFSZ",
];
/// Number of `SIGRTMIN`; those of `SIGRTMIN+1` to `SIGRTMIN+15` follow.
const RTMIN: i32 = 35;
/// Number of `SIGRTMAX`; those of `SIGRTMAX-1` to `SIGRTMAX-14` come before it.
const RTMAX: i32 = 65;

/// Returns the CRI's number of a signal; `None` when there is none of that name.
pub fn number_of(name: &str) -> Option<i32> {
    let within = |text: &str, most: i32| {
        let number = text.parse::<i32>().ok();
        number.filter(|n| (1..=most).contains(n) && n.to_string() == text)
    };
    if let Some(index) = NAMES.iter().position(|known| *known == name) {
        return i32::try_from(index + 1).ok();
    }
    match name {
        "SIGRTMIN" => Some(RTMIN),
        "SIGRTMAX" => Some(RTMAX),
        _ => match (
            name.strip_prefix("SIGRTMIN+"),
            name.strip_prefix("SIGRTMAX-"),
        ) {
            (Some(above), _) => within(above, 15).map(|n| RTMIN + n),
            (None, Some(below)) => within(below, 14).map(|n| RTMAX - n),
            (None, None) => None,
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn signals_have_the_numbers_of_the_interface() {
        for (name, number) in [
            ("SIGABRT", Some(1)),
            ("SIGINT", Some(10)),
            ("SIGKILL", Some(13)),
            ("SIGTERM", Some(23)),
            ("SIGUSR1", Some(29)),
            ("SIGXFSZ", Some(34)),
            ("SIGRTMIN", Some(35)),
            ("SIGRTMIN+1", Some(36)),
            ("SIGRTMIN+15", Some(50)),
            ("SIGRTMAX-14", Some(51)),
            ("SIGRTMAX-1", Some(64)),
            ("SIGRTMAX", Some(65)),
            ("SIGRTMIN+16", None),
            ("SIGRTMIN+01", None),
            ("SIGRTMAX-15", None),
            ("SIGRTMAX-0", None),
            ("USR1", None),
            ("sigterm", None),
            ("", None),
        ] {
            assert_eq!(number_of(name), number, "{name}");
        }
    }
}
