//! Encodes the active configuration as an equivalent file.
//!
//! Secrets are left out: the values of `staticPodURLHeader`, and a user with a password in `staticPodURL`.
//! Everything else reads back as it was.

use std::fmt;

use serde_json::{Map, Value, json};

use super::fields::{FIELDS, Field, Kind, Support};
use super::types::{EvictionThreshold, KubeletConfiguration};
use super::{API_VERSION, KIND};
use crate::types::quantity::of_bytes;

/// Placeholder for a secret.
const REDACTED: &str = "<redacted>";
/// Billionths.
const BILLION: i128 = 1_000_000_000;

/// The order of the fields in the answer. Others follow in the order of [`FIELDS`].
const ORDER: &str = "\
    staticPodPath podLogsDir syncFrequency fileCheckFrequency httpCheckFrequency staticPodURL \
    staticPodURLHeader enableServer address port readOnlyPort tlsCertFile tlsPrivateKeyFile \
    tlsCipherSuites tlsCurvePreferences tlsMinVersion serverTLSBootstrap authentication authorization \
    streamingConnectionIdleTimeout enableDebuggingHandlers enableProfilingHandler \
    enableDebugFlagsHandler enableSystemLogHandler enableSystemLogQuery rotateCertificates \
    imagePullCredentialsVerificationPolicy preloadedImagesVerificationAllowlist eventRecordQPS \
    eventBurst healthzPort healthzBindAddress clusterDomain clusterDNS nodeStatusUpdateFrequency \
    nodeStatusReportFrequency nodeLeaseDurationSeconds cgroupRoot cgroupsPerQOS cgroupDriver \
    runtimeRequestTimeout oomScoreAdj maxPods podsPerCore singleProcessOOMKill podPidsLimit resolvConf \
    cpuCFSQuota cpuCFSQuotaPeriod nodeStatusMaxImages contentType kubeAPIQPS kubeAPIBurst \
    serializeImagePulls imageMinimumGCAge imageMaximumGCAge imageGCHighThresholdPercent \
    imageGCLowThresholdPercent maxParallelImagePulls evictionHard evictionSoft evictionSoftGracePeriod \
    evictionPressureTransitionPeriod evictionMaxPodGracePeriod evictionMinimumReclaim \
    mergeDefaultEvictionSettings containerLogMaxSize containerLogMaxFiles containerLogMaxWorkers \
    containerLogMonitorInterval configMapAndSecretChangeDetectionStrategy systemReserved kubeReserved \
    cpuManagerPolicy cpuManagerPolicyOptions cpuManagerReconcilePeriod memoryManagerPolicy \
    topologyManagerPolicy topologyManagerScope topologyManagerPolicyOptions reservedSystemCPUs \
    reservedMemory enforceNodeAllocatable systemReservedCgroup kubeReservedCgroup kubeletCgroups \
    systemCgroups qosReserved protectKernelDefaults failSwapOn makeIPTablesUtilChains \
    enableControllerAttachDetach memorySwap memoryThrottlingFactor memoryReservationPolicy \
    allowedUnsafeSysctls providerID logging crashLoopBackOff seccompDefault registerWithTaints registerNode \
    shutdownGracePeriod shutdownGracePeriodCriticalPods shutdownGracePeriodByPodPriority tracing \
    containerRuntimeEndpoint imageServiceEndpoint failCgroupV1";

/// Returns `config` as a `KubeletConfiguration` object (v1beta1): the fields this version acts on, defaults included,
/// and those without effect that were given.
pub fn encode(config: &KubeletConfiguration) -> Value {
    let mut out = Map::new();
    out.insert("kind".to_owned(), json!(KIND));
    out.insert("apiVersion".to_owned(), json!(API_VERSION));
    let place = |field: &&Field| {
        let mut names = ORDER.split_whitespace();
        names
            .position(|name| name == field.name)
            .unwrap_or(usize::MAX)
    };
    let mut fields: Vec<&Field> = FIELDS.iter().collect();
    fields.sort_by_cached_key(place);
    for field in fields {
        put(&mut out, field, config);
    }
    merge(&mut out, &config.without_effect);
    Value::Object(out)
}

/// Adds the value of `field`, or those of its fields, to `out`.
fn put(out: &mut Map<String, Value>, field: &Field, config: &KubeletConfiguration) {
    let value = match (field.kind, field.setting) {
        (_, Some(setting)) => (setting.write)(config),
        (Kind::Object(_), None) if field.name == "tracing" && config.tracing.is_none() => return,
        (Kind::Object(fields), None) if field.support == Support::Supported => {
            let mut object = Map::new();
            for field in fields {
                put(&mut object, field, config);
            }
            Value::Object(object)
        }
        _ => return,
    };
    if !value.is_null() {
        out.insert(field.name.to_owned(), value);
    }
}

/// Adds what `more` has to `out`, object by object.
fn merge(out: &mut Map<String, Value>, more: &Map<String, Value>) {
    for (name, value) in more {
        match (out.get_mut(name), value) {
            (Some(Value::Object(inner)), Value::Object(more)) => merge(inner, more),
            _ => {
                out.insert(name.clone(), value.clone());
            }
        }
    }
}

/// Returns a placeholder for each value.
pub(super) fn hidden(values: &[String]) -> Value {
    json!(vec![REDACTED; values.len()])
}

/// A URL whose user and password, if it has them, are left out.
pub(super) fn without_user(url: &str) -> String {
    let Some((scheme, rest)) = url.split_once("://") else {
        return url.to_owned();
    };
    let end = rest.find(['/', '?', '#']).unwrap_or(rest.len());
    let (authority, tail) = rest.split_at(end);
    match authority.rsplit_once('@') {
        Some((_, host)) => format!("{scheme}://{REDACTED}@{host}{tail}"),
        None => url.to_owned(),
    }
}

/// A quantity of so many billionths.
pub(super) fn quantity(nanos: i128) -> String {
    let whole = nanos / BILLION;
    if nanos % BILLION != 0 {
        let units = [("m", 1_000_000), ("u", 1_000), ("n", 1)];
        let unit = units.into_iter().find(|(_, scale)| nanos % scale == 0);
        let (unit, scale) = unit.unwrap_or(("n", 1));
        return format!("{}{unit}", nanos / scale);
    }
    u64::try_from(whole).map_or_else(|_| whole.to_string(), of_bytes)
}

pub(super) fn threshold(threshold: EvictionThreshold) -> String {
    match threshold {
        EvictionThreshold::Quantity(0) => "0%".to_owned(),
        EvictionThreshold::Quantity(amount) => of_bytes(amount),
        EvictionThreshold::Fraction(fraction) => percent(fraction),
    }
}

impl fmt::Display for EvictionThreshold {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&threshold(*self))
    }
}

/// The shortest percentage that reads back as `fraction`.
fn percent(fraction: f32) -> String {
    let percent = f64::from(fraction) * 100.0;
    (0..=12)
        .map(|digits| format!("{percent:.digits$}"))
        .find(|text| {
            text.parse::<f32>()
                .is_ok_and(|percent| percent / 100.0 == fraction)
        })
        .map_or_else(|| format!("{percent}%"), |text| format!("{text}%"))
}

#[cfg(test)]
mod tests;
