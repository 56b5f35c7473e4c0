//! What happens in a case, and how cases are made up.

use proptest::prelude::*;

pub(crate) const UID: &str = "uid-1";

#[derive(Clone, Debug)]
pub(crate) enum Event {
    /// Containers of that index end with a code.
    Exit(usize, i32),
    /// A running container disappears, and with it its end.
    Vanish(usize),
    /// The runtime forgets ended containers of that index.
    Forget(usize),
    /// The runtime cannot tell whether a container runs.
    Unknown(usize),
    /// The sandbox stops.
    SandboxDies,
    /// Everything in the runtime is gone.
    Wipe,
    /// The image in the spec changes.
    NewImage(usize),
    /// The liveness probe fails.
    Unhealthy(usize),
    /// The wall clock jumps by hours.
    WallJump(i64),
    /// Time passes, in seconds.
    Pass(i64),
}

#[derive(Clone, Debug)]
pub(crate) struct Case {
    pub(crate) policy: &'static str,
    pub(crate) containers: usize,
    /// Events, and before which effect the sync after each crashes.
    pub(crate) steps: Vec<(Event, Option<u8>)>,
}

pub(crate) fn event() -> impl Strategy<Value = Event> {
    let i = 0..3_usize;
    prop_oneof![
        4 => (i.clone(), prop_oneof![Just(0), Just(1), Just(3)]).prop_map(|(i, c)| Event::Exit(i, c)),
        1 => i.clone().prop_map(Event::Vanish),
        2 => i.clone().prop_map(Event::Forget),
        1 => i.clone().prop_map(Event::Unknown),
        1 => Just(Event::SandboxDies),
        1 => Just(Event::Wipe),
        1 => i.clone().prop_map(Event::NewImage),
        1 => i.prop_map(Event::Unhealthy),
        1 => (-20..20_i64).prop_map(Event::WallJump),
        4 => prop_oneof![0..15_i64, 15..400_i64, 400..2000_i64].prop_map(Event::Pass),
    ]
}

pub(crate) fn case() -> impl Strategy<Value = Case> {
    (
        prop_oneof![Just("Always"), Just("OnFailure"), Just("Never")],
        1..4_usize,
        prop::collection::vec((event(), prop::option::weighted(0.6, 0..14_u8)), 0..16),
    )
        .prop_map(|(policy, containers, steps)| Case {
            policy,
            containers,
            steps,
        })
}
