//! What a start must not be, told from the spec and the truth alone.

use crate::case::{Kind, Spec};
use crate::world::{Run, World, name};

/// How the run before a start ended.
#[derive(Clone, Copy)]
pub(crate) struct Last {
    pub(crate) exit: i32,
    pub(crate) same_sandbox: bool,
}

/// Whether the spec wants a container again after that exit code.
pub(crate) fn wants_again(pod: &str, spec: &Spec, exit: i32) -> bool {
    match spec.kind {
        Kind::Ephemeral => return false,
        Kind::Sidecar => return true,
        Kind::Init if exit == 0 => return false,
        Kind::Init | Kind::Main => {}
    }
    if let Some((operator, codes)) = &spec.rule
        && codes.contains(&exit) == (*operator == "In")
    {
        return true;
    }
    match spec.policy.unwrap_or(pod) {
        "Always" => true,
        "OnFailure" => exit != 0,
        _ => false,
    }
}

/// Whether the pod gets one sandbox in its life: nothing in it may ever run again.
pub(crate) fn is_once_only(pod: &str, specs: &[Spec]) -> bool {
    let again = |s: &Spec| s.rule.is_some() || s.policy.is_some_and(|p| p != "Never");
    let mut mains = specs.iter().filter(|s| s.kind == Kind::Main);
    pod == "Never" && !mains.any(again)
}

pub(crate) fn restart(pod: &str, spec: &Spec, name: &str, last: Last, replaced: bool) {
    assert_ne!(spec.kind, Kind::Ephemeral, "{name} ran again");
    if replaced {
        return;
    }
    let anew = matches!(spec.kind, Kind::Init | Kind::Sidecar) && !last.same_sandbox;
    assert!(
        anew || wants_again(pod, spec, last.exit),
        "{name} ran again after {} in spite of its policy: {spec:?} in {pod}",
        last.exit
    );
}

/// Nothing starts before what it waits for, in the sandbox it starts in.
pub(crate) fn order(world: &World, starting: &str, sandbox: &str) {
    let here = |of: &str| -> Vec<&Run> {
        let all = world.truth[of].iter();
        all.filter(|r| r.sandbox == sandbox).collect()
    };
    let kind = world.spec_of(starting).kind;
    if is_once_only(world.policy, &world.specs) {
        let elsewhere = world
            .truth
            .values()
            .flatten()
            .find(|r| r.sandbox != sandbox);
        assert!(
            elsewhere.is_none(),
            "{starting} started in a second sandbox"
        );
    }
    if kind == Kind::Ephemeral {
        return;
    }
    let indexed = || world.specs.iter().enumerate().map(|(i, s)| (name(i), s));
    let mains_ran = indexed().any(|(n, s)| s.kind == Kind::Main && !here(&n).is_empty());
    if kind == Kind::Init {
        assert!(!mains_ran, "{starting} started after a main container");
    }
    let first = here(starting).is_empty() && !mains_ran;
    for (before, spec) in indexed().take_while(|(n, _)| n != starting) {
        let runs = here(&before);
        match spec.kind {
            Kind::Init => assert_eq!(
                runs.last().and_then(|r| r.exit),
                Some(0),
                "{starting} started before {before} completed"
            ),
            Kind::Sidecar if first => {
                // One that is restarted for its liveness meanwhile holds nobody up.
                let lived = |r: &Run| {
                    let until = if r.running {
                        world.boottime_ms
                    } else {
                        r.finished_ms
                    };
                    until - r.started_ms
                };
                let started = |r: &&Run| {
                    (!spec.probe || lived(r) > 5000) && (!spec.hook || world.hooked.contains(&r.id))
                };
                assert!(
                    runs.into_iter().any(|r| started(&r)),
                    "{starting} started before {before} had"
                );
            }
            Kind::Sidecar => assert!(!runs.is_empty(), "{starting} started before {before}"),
            Kind::Main | Kind::Ephemeral => {}
        }
    }
}

/// What a pod at rest must look like.
pub(crate) fn rest(world: &World) {
    let indexed = || world.specs.iter().enumerate().map(|(i, s)| (name(i), s));
    let running = |of: &str| world.truth[of].iter().filter(|r| r.running).count();
    // A start that was decided and wiped before it was made may have been made, for all the agent knows.
    let lost = |of: &str| {
        let number = |id: &str| id.trim_start_matches('k').parse::<u32>().ok();
        let decided = world.intents.get(of).into_iter().flatten();
        let newest_decided = decided.filter_map(|id| number(id.as_str())).max();
        let newest_run = world.truth[of].last().and_then(|r| number(&r.id));
        world.wiped && newest_decided > newest_run
    };
    let failed = indexed().any(|(n, spec)| {
        let last = world.truth[&n].last();
        let exit = match last {
            _ if lost(&n) => 137,
            None => 0,
            Some(r) => r.exit.filter(|_| r.recorded).unwrap_or(137),
        };
        spec.kind == Kind::Init && exit != 0 && !wants_again(world.policy, spec, exit)
    });
    let mains = || indexed().filter(|(_, s)| s.kind == Kind::Main);
    let any_main = mains().any(|(n, _)| running(&n) > 0);
    for (n, spec) in indexed() {
        let count = running(&n);
        assert!(count <= 1, "{n} runs {count} times");
        match spec.kind {
            Kind::Init => assert_eq!(count, 0, "{n} still runs"),
            Kind::Sidecar => assert_eq!(count == 1, any_main, "{n}: {count} running"),
            Kind::Ephemeral => assert!(count == 0 || any_main, "{n} keeps the pod"),
            Kind::Main => {
                let last = world.truth[&n].last();
                let wanted = match last {
                    _ if lost(&n) => wants_again(world.policy, spec, 137),
                    None => true,
                    Some(r) if r.recorded => wants_again(world.policy, spec, r.exit.unwrap_or(137)),
                    Some(_) => spec.policy.unwrap_or(world.policy) == "Always",
                };
                let excused = failed || is_once_only(world.policy, &world.specs);
                assert!(
                    count == 1 || !wanted || excused,
                    "{n} should run: {last:?}, {spec:?}"
                );
            }
        }
    }
    for id in world.truth.iter().flat_map(|(n, runs)| {
        let hook = world.spec_of(n).hook;
        runs.iter()
            .filter(move |r| hook && r.running)
            .map(|r| &r.id)
    }) {
        assert!(world.hooked.contains(id), "the hook of {id} was never done");
    }
}
