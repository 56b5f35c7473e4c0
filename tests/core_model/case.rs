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
    /// The startup probe fails.
    Stillborn(usize),
    /// The wall clock jumps by hours.
    WallJump(i64),
    /// Time passes, in seconds.
    Pass(i64),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Init,
    Sidecar,
    Main,
    Ephemeral,
}

/// One container of the spec.
#[derive(Clone, Debug)]
pub(crate) struct Spec {
    pub(crate) kind: Kind,
    /// A policy of its own.
    pub(crate) policy: Option<&'static str>,
    /// Beside its own policy: exit codes after which it runs again.
    pub(crate) rule: Option<(&'static str, Vec<i32>)>,
    /// Has a postStart hook.
    pub(crate) hook: bool,
    /// Has a startup probe, which succeeds a while after the start.
    pub(crate) probe: bool,
}

impl Spec {
    pub(crate) fn of(kind: Kind) -> Self {
        Self {
            kind,
            policy: None,
            rule: None,
            hook: false,
            probe: false,
        }
    }

    pub(crate) fn mains(count: usize) -> Vec<Self> {
        vec![Self::of(Kind::Main); count]
    }

    /// Main containers and nothing special.
    pub(crate) fn is_simple(&self) -> bool {
        self.kind == Kind::Main && self.policy.is_none() && !self.hook && !self.probe
    }
}

#[derive(Clone, Debug)]
pub(crate) struct Case {
    pub(crate) policy: &'static str,
    pub(crate) containers: Vec<Spec>,
    /// Events, and before which effect the sync after each crashes.
    pub(crate) steps: Vec<(Event, Option<u8>)>,
}

pub(crate) fn event(containers: usize) -> impl Strategy<Value = Event> {
    let i = 0..containers;
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
        prop::collection::vec((event(3), prop::option::weighted(0.6, 0..14_u8)), 0..16),
    )
        .prop_map(|(policy, containers, steps)| Case {
            policy,
            containers: Spec::mains(containers),
            steps,
        })
}

/// Any kinds of containers, with policies, rules, probes and hooks of their own.
pub(crate) fn rich_case() -> impl Strategy<Value = Case> {
    let own = || {
        prop_oneof![
            3 => Just(None),
            1 => Just(Some("Always")),
            1 => Just(Some("OnFailure")),
            2 => Just(Some("Never")),
        ]
    };
    let rule = || {
        prop::option::weighted(
            0.4,
            (
                prop_oneof![Just("In"), Just("NotIn")],
                prop_oneof![Just(vec![3]), Just(vec![0, 137]), Just(vec![1, 143])],
            ),
        )
    };
    let init = (0..3_u8, own(), rule(), any::<bool>(), any::<bool>()).prop_map(
        |(kind, policy, rule, hook, probe)| match kind {
            0 => Spec {
                hook,
                probe,
                ..Spec::of(Kind::Sidecar)
            },
            _ => {
                let policy = policy.filter(|p| *p != "Always");
                Spec {
                    rule: rule.filter(|_| policy.is_some()),
                    policy,
                    ..Spec::of(Kind::Init)
                }
            }
        },
    );
    let main = (own(), rule(), any::<bool>()).prop_map(|(policy, rule, hook)| Spec {
        rule: rule.filter(|_| policy.is_some()),
        policy,
        hook,
        ..Spec::of(Kind::Main)
    });
    let ephemeral = prop::option::weighted(0.3, Just(Spec::of(Kind::Ephemeral)));
    let event = prop_oneof![
        12 => event(6),
        1 => (0..6_usize).prop_map(Event::Stillborn),
    ];
    (
        prop_oneof![Just("Always"), Just("OnFailure"), Just("Never")],
        prop::collection::vec(init, 0..4),
        prop::collection::vec(main, 1..3),
        ephemeral,
        prop::collection::vec((event, prop::option::weighted(0.5, 0..24_u8)), 0..20),
    )
        .prop_map(|(policy, mut containers, mains, ephemeral, steps)| {
            containers.extend(mains);
            containers.extend(ephemeral);
            Case {
                policy,
                containers,
                steps,
            }
        })
}
