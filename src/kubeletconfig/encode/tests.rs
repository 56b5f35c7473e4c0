//! Encoded configurations read back, and secrets are not encoded.

use super::super::fields::{FIELDS, Field, Kind, Support};
use super::super::load::load;
use super::*;

fn read_back(config: &KubeletConfiguration) -> KubeletConfiguration {
    let root = tempfile::tempdir().unwrap();
    let file = root.path().join("config.yaml");
    std::fs::write(&file, encode(config).to_string()).unwrap();
    load(Some(&file), None).unwrap().config
}

fn parsed(yaml: &str) -> KubeletConfiguration {
    let root = tempfile::tempdir().unwrap();
    let file = root.path().join("config.yaml");
    let text = format!("apiVersion: {API_VERSION}\nkind: {KIND}\n{yaml}");
    std::fs::write(&file, text).unwrap();
    load(Some(&file), None).unwrap().config
}

#[test]
fn the_defaults_read_back() {
    let config = KubeletConfiguration::default();
    assert_eq!(read_back(&config), config);
}

#[test]
fn every_kind_of_value_reads_back() {
    let config = parsed(
        r#"
staticPodPath: /etc/kubernetes/manifests
staticPodURL: https://example.com/pods?x=a@b
syncFrequency: 1m30s
healthzPort: 0
healthzBindAddress: "::1"
cgroupDriver: systemd
cgroupRoot: /pods
containerLogMaxSize: 1500k
containerLogMaxFiles: 7
containerLogMaxWorkers: 2
containerLogMonitorInterval: 4s
imageMinimumGCAge: 3m0s
imageMaximumGCAge: 24h
imageGCHighThresholdPercent: 90
imageGCLowThresholdPercent: 70
address: 127.0.0.1
tlsMinVersion: VersionTLS13
authentication:
  x509: {clientCAFile: /etc/ca.crt}
  webhook: {cacheTTL: 1m}
authorization:
  webhook: {cacheAuthorizedTTL: 1m, cacheUnauthorizedTTL: 7s}
streamingConnectionIdleTimeout: 1h
enableProfilingHandler: false
enableDebugFlagsHandler: false
enableSystemLogQuery: true
maxParallelImagePulls: 3
imagePullCredentialsVerificationPolicy: NeverVerifyAllowlistedImages
preloadedImagesVerificationAllowlist: ["registry.example.com/a/*"]
podPidsLimit: 4096
podsPerCore: 9
singleProcessOOMKill: false
oomScoreAdj: -500
cpuCFSQuotaPeriod: 50ms
resolvConf: ""
clusterDNS: [10.96.0.10, "fd00::10"]
clusterDomain: cluster.local
logging: {format: json, verbosity: 4}
tracing: {endpoint: "collector:4317", samplingRatePerMillion: 250000}
crashLoopBackOff: {maxContainerRestartPeriod: 30s}
nodeStatusMaxImages: -1
evictionHard:
  memory.available: 100Mi
  nodefs.available: 7.3%
  imagefs.available: 33.33%
  pid.available: "1001"
  nodefs.inodesFree: 0%
evictionSoft: {memory.available: 200Mi, pid.available: 5%}
evictionSoftGracePeriod: {memory.available: 1m30s, pid.available: 0s}
evictionPressureTransitionPeriod: 30s
evictionMaxPodGracePeriod: 60
evictionMinimumReclaim: {memory.available: 0Mi, nodefs.available: 1.5%, imagefs.available: 2Gi}
systemReserved: {cpu: 250m, memory: 1Gi, pid: "1000"}
kubeReserved: {cpu: "0.1000005", memory: 100Mi}
enforceNodeAllocatable: [none]
allowedUnsafeSysctls: ["net.core.*"]
cpuManagerPolicy: static
cpuManagerPolicyOptions: {full-pcpus-only: "true"}
cpuManagerReconcilePeriod: 5s
memoryManagerPolicy: Static
reservedMemory: [{numaNode: 1, limits: {memory: 1Gi, hugepages-2Mi: 64Mi}}]
topologyManagerPolicy: restricted
topologyManagerScope: pod
topologyManagerPolicyOptions: {prefer-closest-numa-nodes: "true"}
reservedSystemCPUs: 0,2-3
providerID: cloud://x
registerWithTaints: [{key: a, value: b, effect: NoSchedule}]
shutdownGracePeriodByPodPriority: [{priority: 7, shutdownGracePeriodSeconds: 20}, {shutdownGracePeriodSeconds: 1}]
"#,
    );
    assert_ne!(config, KubeletConfiguration::default());
    assert_eq!(read_back(&config), config);
    let written = encode(&config);
    assert_eq!(written["evictionHard"]["nodefs.available"], "7.3%");
    assert_eq!(
        written["evictionSoftGracePeriod"]["memory.available"],
        "1m30s"
    );
    assert_eq!(
        written["evictionMinimumReclaim"]["imagefs.available"],
        "2Gi"
    );
    assert_eq!(
        written["systemReserved"]["cpu"], "3",
        "replaced by reservedSystemCPUs"
    );
    assert_eq!(written["reservedMemory"][0]["limits"]["memory"], "1Gi");
    assert_eq!(written["systemReserved"]["memory"], "1Gi");
    assert_eq!(written["kubeReserved"]["memory"], "100Mi");
}

#[test]
fn secrets_are_not_written() {
    let config = KubeletConfiguration {
        static_pod_url: Some("https://me:hunter2@example.com/pods".to_owned()),
        static_pod_url_header: [(
            "Authorization".to_owned(),
            vec!["Bearer s3cret".to_owned(), "s3cret".to_owned()],
        )]
        .into(),
        ..KubeletConfiguration::default()
    };
    let written = encode(&config);
    let text = written.to_string();
    assert!(
        !text.contains("s3cret") && !text.contains("hunter2"),
        "{text}"
    );
    assert_eq!(
        written["staticPodURLHeader"]["Authorization"],
        json!([REDACTED, REDACTED])
    );
    assert_eq!(
        written["staticPodURL"],
        "https://<redacted>@example.com/pods"
    );
}

/// A field that is acted on and not written would be a configuration that does not read back.
#[test]
fn every_supported_field_is_written() {
    let set = parsed(
        "staticPodPath: /m\nstaticPodURL: http://x/\nstaticPodURLHeader: {A: [b]}\nmaxParallelImagePulls: 2\n\
         providerID: x\npodCIDR: 10.0.0.0/24\nsingleProcessOOMKill: true\ntracing: {}\ntlsCertFile: /c\ntlsPrivateKeyFile: /k\n\
         systemReservedCgroup: /s\nkubeReservedCgroup: /k\nkubeletCgroups: /a\nsystemCgroups: /b\n\
         qosReserved: {memory: 50%}\nmemoryThrottlingFactor: 0.9\n\
         cpuManagerPolicy: static\ncpuManagerPolicyOptions: {full-pcpus-only: \"true\"}\nreservedSystemCPUs: \"0\"\n\
         memoryManagerPolicy: Static\nreservedMemory: [{numaNode: 0, limits: {memory: 1}}]\n\
         topologyManagerPolicyOptions: {max-allowable-numa-nodes: \"9\"}\n",
    );
    let written = encode(&set);
    let missing: Vec<_> = FIELDS
        .iter()
        .filter(|field| field.support == Support::Supported && written.get(field.name).is_none())
        .map(|field| field.name)
        .collect();
    assert!(
        missing.is_empty(),
        "not in the answer of /configz: {missing:?}"
    );
}

/// A document with every field without effect, each with a value that is not its default.
fn without_effect(fields: &[Field]) -> Map<String, Value> {
    let sample = |field: &Field| match field.kind {
        Kind::Bool => json!(field.unset != ["true"]),
        Kind::Int32 | Kind::Uint32 | Kind::Int64 => json!(7),
        Kind::Number => json!(0.5),
        Kind::String => json!("x"),
        Kind::Duration | Kind::DurationOrNanos => json!("1m30s"),
        Kind::Quantity => json!("1Mi"),
        Kind::Strings => json!(["x"]),
        Kind::Ints => json!([7]),
        Kind::StringMap => json!({"a": "x"}),
        Kind::StringsMap => json!({"a": ["x"]}),
        Kind::BoolMap => json!({"A": true, "B": false}),
        Kind::QuantityMap => json!({"a": "1Mi"}),
        Kind::Objects(fields) => json!([without_effect(fields)]),
        Kind::Object(fields) => Value::Object(without_effect(fields)),
    };
    fields
        .iter()
        .filter(|field| field.support == Support::NotYet || matches!(field.kind, Kind::Object(_)))
        .map(|field| (field.name.to_owned(), sample(field)))
        .filter(|(_, value)| *value != json!({}))
        .collect()
}

/// Returns whether `whole` contains all of `part`.
fn contains(whole: &Value, part: &Value) -> bool {
    match (whole, part) {
        (Value::Object(whole), Value::Object(part)) => part
            .iter()
            .all(|(key, part)| whole.get(key).is_some_and(|whole| contains(whole, part))),
        (whole, part) => whole == part,
    }
}

#[test]
fn every_field_without_effect_that_was_given_is_written() {
    let given = without_effect(FIELDS);
    for name in ["featureGates", "hairpinMode"] {
        assert!(given.contains_key(name), "{name}");
    }
    let lines: String = given
        .iter()
        .map(|(name, value)| format!("{name}: {value}\n"))
        .collect();
    let config = parsed(&lines);
    let written = encode(&config);
    for (name, value) in &given {
        let shown = written.get(name).unwrap_or(&Value::Null);
        assert!(contains(shown, value), "{name}: {value}, shown {shown}");
    }
    assert_eq!(written["logging"]["format"], "text", "beside the others");
    assert_eq!(read_back(&config), config);
    assert_eq!(encode(&parsed("")).get("featureGates"), None, "not given");
}

#[test]
fn a_zero_that_stands_for_the_default_is_written_as_the_default() {
    let written = encode(&parsed(
        "cpuManagerReconcilePeriod: 0s\ncpuManagerPolicy: \"\"\nmaxOpenFiles: 0\nfailSwapOn: true\n\
         memorySwap: {}\nlogging: {flushFrequency: 0, options: {json: {infoBufferSize: 0}}}\n",
    ));
    assert_eq!(written["cpuManagerReconcilePeriod"], "10s");
    assert_eq!(written["cpuManagerPolicy"], "none");
    assert_eq!(written["maxOpenFiles"], 1_000_000);
    assert_eq!(written["failSwapOn"], true);
    assert_eq!(written["memorySwap"], json!({"swapBehavior": "NoSwap"}));
    assert_eq!(written["logging"]["flushFrequency"], "5s");
    assert_eq!(written["logging"]["options"]["json"]["infoBufferSize"], "0");
}

#[test]
fn fields_without_effect_are_merged_as_drop_ins_are() {
    let root = tempfile::tempdir().unwrap();
    let write = |name: &str, body: &str| {
        let path = root.path().join(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        let text = format!("apiVersion: {API_VERSION}\nkind: {KIND}\n{body}");
        std::fs::write(&path, text).unwrap();
        path
    };
    let file = write(
        "c.yaml",
        "featureGates: {A: true, B: false}\nhairpinMode: none\nmemorySwap: {swapBehavior: LimitedSwap}\n\
         logging: {vmodule: [{filePattern: a}, {filePattern: b}]}\nfutureField: 1\n",
    );
    write(
        "d/x.conf",
        "featureGates: {B: true, A: null, C: true}\nhairpinMode: null\nmemorySwap: null\n\
         logging: {vmodule: [{filePattern: c, future: 1}]}\n",
    );
    let config = load(Some(&file), Some(&root.path().join("d")))
        .unwrap()
        .config;
    assert_eq!(
        Value::Object(config.without_effect),
        json!({
            "featureGates": {"B": true, "C": true},
            "logging": {"vmodule": [{"filePattern": "c"}]},
        })
    );
}
