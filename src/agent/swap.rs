//! Swap of the machine beside the settings that concern it. Unlike upstream, swap that is on does not keep the agent from starting: pods
//! that run would be left alone.

use std::fs;

use tracing::warn;

use crate::kubeletconfig::SwapBehavior;
use crate::types::{Event, EventRecorder, EventType};

/// The kernel's list of swap.
const SWAPS: &str = "/proc/swaps";

/// Reports swap that is on where `failSwapOn` says so.
pub(super) fn report(fail_swap_on: bool, recorder: &dyn EventRecorder) {
    if !fail_swap_on {
        return;
    }
    // A kernel without swap has no such file.
    let swaps = fs::read(SWAPS).unwrap_or_default();
    if is_on(&swaps) {
        let text = "swap is on and failSwapOn is true; turn swap off (swapoff -a), or set failSwapOn: false. Pods run anyway";
        warn!("{text}");
        recorder.record(Event::node(EventType::Warning, "SwapOn", text));
    }
}

/// Returns whether the list has more than its head line. Names of files in it need not be UTF-8. Upstream:
/// `isSwapOnAccordingToProcSwaps`.
fn is_on(swaps: &[u8]) -> bool {
    let lines = swaps.trim_ascii().split(|byte| *byte == b'\n');
    lines.count() > 1
}

/// Returns why containers get no share of the machine's swap although they are to.
pub(super) fn without_effect(
    behavior: SwapBehavior,
    cgroup_v2: bool,
    can_limit: bool,
) -> Option<&'static str> {
    match (behavior, cgroup_v2, can_limit) {
        (SwapBehavior::NoSwap, ..) | (SwapBehavior::LimitedSwap, true, true) => None,
        (SwapBehavior::LimitedSwap, false, _) => Some(
            "this machine has cgroup v1, where containers get no swap; boot with systemd.unified_cgroup_hierarchy=1, or set NoSwap",
        ),
        (SwapBehavior::LimitedSwap, true, false) => Some(
            "the kernel does not limit swap (memory.swap.max is missing), and containers use it as they like; boot with \
             swapaccount=1, or turn swap off",
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn swap_is_on_where_the_kernel_lists_some() {
        let head = b"Filename\t\t\t\tType\t\tSize\tUsed\tPriority\n".as_slice();
        let of = |lines: &[u8]| [head, lines].concat();
        for (swaps, wanted) in [
            (Vec::new(), false),
            (of(b""), false),
            (of(b"/dev/dm-0  partition\t1679356\t600\t-1\n"), true),
            (of(b"/swap/caf\xe9  file\t1679356\t600\t-1\n"), true),
        ] {
            assert_eq!(is_on(&swaps), wanted, "{swaps:?}");
        }
    }

    #[test]
    fn limited_swap_that_cannot_be_limited_is_named() {
        use SwapBehavior::{LimitedSwap, NoSwap};
        for (behavior, cgroup_v2, can_limit, wanted) in [
            (NoSwap, false, false, None),
            (LimitedSwap, true, true, None),
            (LimitedSwap, false, true, Some("cgroup v1")),
            (LimitedSwap, true, false, Some("memory.swap.max")),
        ] {
            let told = without_effect(behavior, cgroup_v2, can_limit);
            assert_eq!(told.is_some(), wanted.is_some());
            assert!(
                told.unwrap_or_default()
                    .contains(wanted.unwrap_or_default())
            );
        }
    }
}
