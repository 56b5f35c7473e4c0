//! The settings of eviction: how they are read and which rules they must obey.

use std::time::Duration;

use super::codec::Map;
use super::decode::Settings;
use super::duration::{format_duration, parse_duration};
use super::encode::threshold;
use super::problem::Warning;
use super::types::{EvictionThreshold, default_eviction_hard};
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

/// Thresholds, by signal.
pub(super) const THRESHOLDS: Map<EvictionThreshold> = Map {
    parse: parse_threshold,
    show: |value| threshold(*value),
    separator: '<',
    hides_empty: false,
};

/// Minimum reclaims, by signal.
pub(super) const RECLAIMS: Map<EvictionThreshold> = Map {
    parse: parse_reclaim,
    show: |value| threshold(*value),
    separator: '=',
    hides_empty: false,
};

/// Grace periods of soft thresholds, by signal.
pub(super) const GRACES: Map<Duration> = Map {
    parse: parse_grace,
    show: |period| format_duration(*period),
    separator: '=',
    hides_empty: false,
};

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
fn parse_threshold(signal: &str, text: &str) -> Result<EvictionThreshold, String> {
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
fn parse_reclaim(signal: &str, text: &str) -> Result<EvictionThreshold, String> {
    check_signal(signal)?;
    amount(text).ok_or_else(|| {
        format!(
            "{text:?} is neither a quantity from 0, like \"100Mi\", nor a percentage from 0% to 100%"
        )
    })
}

/// Reads one grace period of a soft threshold.
fn parse_grace(signal: &str, text: &str) -> Result<Duration, String> {
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

/// Returns whether a soft threshold is met no earlier than a hard one; false for thresholds of different kinds.
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
