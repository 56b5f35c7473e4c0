//! The settings of eviction: how they are read and which rules they must obey.

use std::collections::BTreeMap;
use std::time::Duration;

use super::cluster::map;
use super::decode::{Reader, Settings};
use super::duration::parse_duration;
use super::flags::{EvictionFlags, Periods, Reclaims, Thresholds};
use super::problem::{Origin, Warning};
use super::types::{EvictionThreshold, KubeletConfiguration, default_eviction_hard};
use crate::types::quantity::nanos;

const BILLION: i128 = 1_000_000_000;

const SIGNALS: [&str; 9] = [
    "memory.available",
    "allocatableMemory.available",
    "nodefs.available",
    "nodefs.inodesFree",
    "imagefs.available",
    "imagefs.inodesFree",
    "containerfs.available",
    "containerfs.inodesFree",
    "pid.available",
];

const NONE: EvictionThreshold = EvictionThreshold::Quantity(0);

fn check_signal(signal: &str) -> Result<(), String> {
    if SIGNALS.contains(&signal) {
        return Ok(());
    }
    Err(format!(
        "{signal:?} is not an eviction signal; known are {}",
        SIGNALS.join(", ")
    ))
}

/// Reads one eviction threshold: an amount or a percentage.
pub(super) fn parse_threshold(signal: &str, text: &str) -> Result<EvictionThreshold, String> {
    check_signal(signal)?;
    let bad = || {
        format!(
            "{text:?} is neither a quantity above 0, like \"100Mi\", nor a percentage from 0% to 100%"
        )
    };
    // Upstream takes both for "no threshold".
    if matches!(text, "0%" | "100%") {
        return Ok(NONE);
    }
    let is_possible = |value: &EvictionThreshold| match value {
        EvictionThreshold::Quantity(amount) => *amount > 0,
        EvictionThreshold::Fraction(fraction) => *fraction < 1.0,
    };
    amount(text).filter(is_possible).ok_or_else(bad)
}

/// Reads one minimum reclaim: an amount or a percentage. Nothing is allowed.
pub(super) fn parse_reclaim(signal: &str, text: &str) -> Result<EvictionThreshold, String> {
    check_signal(signal)?;
    amount(text).ok_or_else(|| {
        format!(
            "{text:?} is neither a quantity from 0, like \"100Mi\", nor a percentage from 0% to 100%"
        )
    })
}

/// Reads one grace period of a soft threshold.
pub(super) fn parse_grace(signal: &str, text: &str) -> Result<Duration, String> {
    check_signal(signal)?;
    parse_duration(text)
}

/// A quantity from 0, or a percentage from 0 to 100.
fn amount(text: &str) -> Option<EvictionThreshold> {
    if let Some(percent) = text.strip_suffix('%') {
        let percent: f32 = percent.parse().ok()?;
        if !(0.0..=100.0).contains(&percent) {
            return None;
        }
        return Some(if percent > 0.0 {
            EvictionThreshold::Fraction(percent / 100.0)
        } else {
            NONE
        });
    }
    let amount = nanos(text).ok().filter(|amount| *amount >= 0)?;
    let whole = u64::try_from((amount + BILLION - 1) / BILLION).ok()?;
    Some(EvictionThreshold::Quantity(whole))
}

/// Takes the value of a field over. Returns whether the field is one of these.
pub(super) fn take(
    r: &mut Reader<'_>,
    c: &mut KubeletConfiguration,
    d: &KubeletConfiguration,
    path: &str,
    again: bool,
) -> bool {
    match path {
        "mergeDefaultEvictionSettings" => {
            c.merge_default_eviction_settings =
                r.bool().unwrap_or(d.merge_default_eviction_settings);
        }
        "evictionHard" => map(
            r,
            &mut c.eviction_hard,
            &d.eviction_hard,
            again,
            parse_threshold,
        ),
        "evictionSoft" => map(
            r,
            &mut c.eviction_soft,
            &d.eviction_soft,
            again,
            parse_threshold,
        ),
        "evictionSoftGracePeriod" => map(
            r,
            &mut c.eviction_soft_grace_period,
            &d.eviction_soft_grace_period,
            again,
            parse_grace,
        ),
        "evictionMinimumReclaim" => map(
            r,
            &mut c.eviction_minimum_reclaim,
            &d.eviction_minimum_reclaim,
            again,
            parse_reclaim,
        ),
        "evictionPressureTransitionPeriod" => {
            c.eviction_pressure_transition_period =
                r.period().unwrap_or(d.eviction_pressure_transition_period);
        }
        "evictionMaxPodGracePeriod" => {
            c.eviction_max_pod_grace_period = r
                .int("a number of seconds")
                .unwrap_or(d.eviction_max_pod_grace_period);
        }
        _ => return false,
    }
    true
}

/// Lays the flags that were given over the settings.
pub(super) fn apply_flags(settings: &mut Settings, flags: &EvictionFlags) {
    macro_rules! over {
        ($flag:literal, $field:literal, $value:expr => $target:ident) => {
            if let Some(value) = $value {
                settings.config.$target = value;
                settings
                    .origins
                    .insert($field, Origin::Flag($flag.to_owned()));
            }
        };
    }
    let f = flags.clone();
    let hard = f.eviction_hard.into_iter().map(|Thresholds(map)| map);
    let soft = f.eviction_soft.into_iter().map(|Thresholds(map)| map);
    let grace = f.eviction_soft_grace_period.into_iter();
    let grace = grace.map(|Periods(map)| map);
    let reclaim = f.eviction_minimum_reclaim.into_iter();
    let reclaim = reclaim.map(|Reclaims(map)| map);
    over!("--eviction-hard", "evictionHard", joined(hard) => eviction_hard);
    over!("--eviction-soft", "evictionSoft", joined(soft) => eviction_soft);
    over!("--eviction-soft-grace-period", "evictionSoftGracePeriod", joined(grace) => eviction_soft_grace_period);
    over!("--eviction-minimum-reclaim", "evictionMinimumReclaim", joined(reclaim) => eviction_minimum_reclaim);
    let transition = f.eviction_pressure_transition_period;
    let transition = transition.filter(|period| !period.is_zero());
    over!("--eviction-pressure-transition-period", "evictionPressureTransitionPeriod", transition => eviction_pressure_transition_period);
    over!("--eviction-max-pod-grace-period", "evictionMaxPodGracePeriod", f.eviction_max_pod_grace_period => eviction_max_pod_grace_period);
}

/// The maps of a repeated flag as one; `None` if it was not given.
fn joined<T>(maps: impl Iterator<Item = BTreeMap<String, T>>) -> Option<BTreeMap<String, T>> {
    maps.reduce(|mut all, more| {
        all.extend(more);
        all
    })
}

/// Upstream's checks in `ParseThresholdConfig`; and warnings of what has no effect.
pub(super) fn validate(settings: &mut Settings) {
    let config = &mut settings.config;
    if config.merge_default_eviction_settings {
        for (signal, threshold) in default_eviction_hard() {
            config.eviction_hard.entry(signal).or_insert(threshold);
        }
    }
    let config = settings.config.clone();
    for (signal, soft) in config.eviction_soft.iter().filter(|(_, t)| **t != NONE) {
        if !config.eviction_soft_grace_period.contains_key(signal) {
            let message =
                format!("{signal:?} has no grace period; add it to evictionSoftGracePeriod");
            settings.reject("evictionSoft", message);
        }
        let hard = config.eviction_hard.get(signal);
        if hard.is_some_and(|hard| is_below(*soft, *hard)) {
            let message = format!(
                "{signal:?} is not above the threshold of evictionHard, which is met first"
            );
            warn(settings, "evictionSoft", message);
        }
    }
    for signal in config.eviction_soft_grace_period.keys() {
        if !config.eviction_soft.contains_key(signal) {
            let message = format!("{signal:?} has no effect: evictionSoft has no threshold for it");
            warn(settings, "evictionSoftGracePeriod", message);
        }
    }
    for (field, map) in [
        ("evictionHard", &config.eviction_hard),
        ("evictionSoft", &config.eviction_soft),
    ] {
        let names = map.keys().filter(|name| name.starts_with("containerfs."));
        for name in names {
            let message = format!(
                "{name:?} has no effect: writable layers count to the file system that they share with images"
            );
            warn(settings, field, message);
        }
    }
}

/// Whether a soft threshold is met no earlier than a hard one. Unknown for thresholds of different kinds.
fn is_below(soft: EvictionThreshold, hard: EvictionThreshold) -> bool {
    match (soft, hard) {
        (EvictionThreshold::Quantity(soft), EvictionThreshold::Quantity(hard)) => soft <= hard,
        (EvictionThreshold::Fraction(soft), EvictionThreshold::Fraction(hard)) => soft <= hard,
        _ => false,
    }
}

fn warn(settings: &mut Settings, field: &'static str, message: String) {
    settings.warnings.push(Warning {
        origin: settings.origin(field),
        field: field.to_owned(),
        message,
    });
}
