//! Setup of the pod workers.

/// Pods that are started at a time, for each processor; the runtime itself is no faster with more.
const STARTS_OF_CORE: usize = 2;
/// And however few processors there are: a start waits for the disk and the network, too.
const LEAST_STARTS: usize = 4;

pub(super) fn starts_at_once(cpus: u64) -> usize {
    let cpus = usize::try_from(cpus).unwrap_or(usize::MAX);
    cpus.saturating_mul(STARTS_OF_CORE).max(LEAST_STARTS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn machines_with_more_processors_start_more_pods_at_a_time() {
        let starts = [1, 2, 3, 8, u64::MAX].map(starts_at_once);
        assert_eq!(starts, [4, 4, 6, 16, usize::MAX]);
    }
}
