//! One case per rule: the field, and what the message says of it.

use super::*;

/// A pod with an init container that has these lines.
fn init(extra: &str) -> String {
    let mut text = format!("{GOOD}  initContainers:\n  - name: first\n    image: i:1\n");
    for line in extra.lines() {
        writeln!(text, "    {line}").unwrap();
    }
    text
}

fn probe(kind: &str, fields: &str) -> String {
    container(&format!("{kind}: {{{fields}}}"))
}

const EXEC: &str = "exec: {command: [x]}";

#[track_caller]
fn check(cases: &[(String, &str, &str)]) {
    for (text, field, message) in cases {
        let told = error(text);
        assert_says(&told, &["line ", &format!("{field}: "), message]);
        assert_eq!(told.matches("line ").count(), 1, "one problem only: {told}");
    }
}

#[test]
fn contradictory_probes_are_explained() {
    let at = "spec.containers[0]";
    let live = format!("{at}.livenessProbe");
    let ready = format!("{at}.readinessProbe");
    let start = format!("{at}.startupProbe");
    let with = |kind: &str, more: &str| probe(kind, &format!("{EXEC}, {more}"));
    let cases = [
        (
            probe("livenessProbe", "periodSeconds: 5"),
            live.clone(),
            "does nothing; give it one of exec, grpc, httpGet, tcpSocket",
        ),
        (
            with("livenessProbe", "tcpSocket: {port: 1}"),
            live.clone(),
            "has 2 handlers; keep one of",
        ),
        (
            with("readinessProbe", "grpc: {port: 1}, httpGet: {port: 1}"),
            ready.clone(),
            "has 3 handlers",
        ),
        (
            with("livenessProbe", "successThreshold: 2"),
            format!("{live}.successThreshold"),
            "is 2; a livenessProbe takes 1 only",
        ),
        (
            with("startupProbe", "successThreshold: 3"),
            format!("{start}.successThreshold"),
            "a startupProbe takes 1 only",
        ),
        (
            with("readinessProbe", "successThreshold: -1"),
            format!("{ready}.successThreshold"),
            "-1 is negative; leave it out",
        ),
        (
            with("livenessProbe", "failureThreshold: -3"),
            format!("{live}.failureThreshold"),
            "is negative",
        ),
        (
            with("livenessProbe", "initialDelaySeconds: -3"),
            format!("{live}.initialDelaySeconds"),
            "is negative",
        ),
        (
            with("livenessProbe", "periodSeconds: -3"),
            format!("{live}.periodSeconds"),
            "is negative",
        ),
        (
            with("livenessProbe", "timeoutSeconds: -3"),
            format!("{live}.timeoutSeconds"),
            "is negative",
        ),
        (
            with("livenessProbe", "terminationGracePeriodSeconds: 0"),
            format!("{live}.terminationGracePeriodSeconds"),
            "is 0; it has to be 1 or more",
        ),
        (
            with("readinessProbe", "terminationGracePeriodSeconds: 5"),
            format!("{ready}.terminationGracePeriodSeconds"),
            "a readiness probe kills nothing; remove it",
        ),
        (
            probe("startupProbe", "exec: {}"),
            format!("{start}.exec.command"),
            "is missing",
        ),
        (
            probe("startupProbe", "grpc: {port: 0}"),
            format!("{start}.grpc.port"),
            "0 has to be between 1 and 65535",
        ),
        (
            probe("startupProbe", "tcpSocket: {port: 65536}"),
            format!("{start}.tcpSocket.port"),
            "between 1 and 65535",
        ),
        (
            probe("startupProbe", "tcpSocket: {port: Web}"),
            format!("{start}.tcpSocket.port"),
            "neither a number nor the name of a port",
        ),
        (
            probe("startupProbe", "httpGet: {port: 80, scheme: FTP}"),
            format!("{start}.httpGet.scheme"),
            "\"FTP\" is not one of HTTP, HTTPS",
        ),
        (
            probe(
                "startupProbe",
                "httpGet: {port: 80, httpHeaders: [{name: 'a b', value: x}]}",
            ),
            format!("{start}.httpGet.httpHeaders[0].name"),
            "is not the name of a header",
        ),
    ];
    let cases: Vec<_> = cases
        .iter()
        .map(|(t, f, m)| (t.clone(), f.as_str(), *m))
        .collect();
    check(&cases);
}

#[test]
fn impossible_hooks_and_signals_are_explained() {
    let hook = "spec.containers[0].lifecycle";
    let pre = format!("{hook}.preStop");
    let post = format!("{hook}.postStart");
    let signal = format!("{hook}.stopSignal");
    let linux = |signal: &str| {
        container(&format!("lifecycle: {{stopSignal: {signal}}}")) + "  os: {name: linux}\n"
    };
    check(&[
        (
            container("lifecycle: {preStop: {}}"),
            &pre,
            "does nothing; give it one of exec, httpGet, sleep",
        ),
        (
            container("lifecycle: {postStart: {exec: {command: [x]}, sleep: {seconds: 1}}}"),
            &post,
            "has 2 handlers",
        ),
        (
            container("lifecycle: {preStop: {exec: {command: []}}}"),
            &format!("{pre}.exec.command"),
            "is missing",
        ),
        (
            container("lifecycle: {preStop: {sleep: {seconds: 31}}}"),
            &format!("{pre}.sleep.seconds"),
            "is 31; it has to be between 0 and the pod's terminationGracePeriodSeconds, 30",
        ),
        (
            container("lifecycle: {preStop: {sleep: {seconds: -1}}}"),
            &format!("{pre}.sleep.seconds"),
            "is -1",
        ),
        (
            container("lifecycle: {postStart: {httpGet: {port: 0}}}"),
            &format!("{post}.httpGet.port"),
            "between 1 and 65535",
        ),
        (
            linux("SIGNOTHING"),
            &signal,
            "is not a signal; write its name in full",
        ),
        (linux("TERM"), &signal, "is not a signal"),
        (linux("SIGRTMIN+16"), &signal, "is not a signal"),
        (linux("SIGRTMAX-15"), &signal, "is not a signal"),
        (linux("SIGRTMIN+01"), &signal, "is not a signal"),
        (
            container("lifecycle: {stopSignal: SIGUSR1}"),
            &signal,
            "needs spec.os.name beside it; set it to linux",
        ),
    ]);
    for fine in ["SIGTERM", "SIGRTMIN", "SIGRTMIN+15", "SIGRTMAX-14"] {
        assert_eq!(one(&linux(fine)).containers().len(), 1, "{fine}");
    }
}

#[test]
fn containers_of_the_wrong_kind_are_explained() {
    let first = "spec.initContainers[0]";
    let never = "is not for init containers that run to their end";
    let rules = "spec.containers[0].restartPolicyRules";
    check(&[
        (
            init("livenessProbe: {exec: {command: [x]}}"),
            &format!("{first}.livenessProbe"),
            never,
        ),
        (
            init("readinessProbe: {exec: {command: [x]}}"),
            &format!("{first}.readinessProbe"),
            never,
        ),
        (
            init("restartPolicy: OnFailure\nstartupProbe: {exec: {command: [x]}}"),
            &format!("{first}.startupProbe"),
            "make a sidecar of the container with restartPolicy: Always",
        ),
        (
            init("lifecycle: {preStop: {sleep: {seconds: 1}}}"),
            &format!("{first}.lifecycle"),
            never,
        ),
        (
            init("resizePolicy: [{resourceName: cpu, restartPolicy: NotRequired}]"),
            &format!("{first}.resizePolicy"),
            never,
        ),
        (
            init("restartPolicy: Sometimes"),
            &format!("{first}.restartPolicy"),
            "is not one of Always, OnFailure, Never",
        ),
        (
            init("").replace("name: first", "name: main"),
            "spec.containers[0].name",
            "\"main\" is used twice; names of containers and init containers are unique",
        ),
        (
            spec("ephemeralContainers: [{name: e, image: i}]"),
            "spec.ephemeralContainers",
            "through an API server only; remove them from the manifest",
        ),
        (
            container(
                "restartPolicyRules: [{action: Restart, exitCodes: {operator: In, values: [1]}}]",
            ),
            rules,
            "need a restartPolicy of the container",
        ),
        (
            container(
                "restartPolicy: Never\nrestartPolicyRules: [{action: Stop, exitCodes: {operator: In, values: [1]}}]",
            ),
            &format!("{rules}[0].action"),
            "\"Stop\" is not one of Restart",
        ),
        (
            container("restartPolicy: Never\nrestartPolicyRules: [{action: Restart}]"),
            &format!("{rules}[0].exitCodes"),
            "is missing; say which exit codes",
        ),
        (
            container(
                "restartPolicy: Never\nrestartPolicyRules: [{action: Restart, exitCodes: {operator: Is, values: [1]}}]",
            ),
            &format!("{rules}[0].exitCodes.operator"),
            "\"Is\" is not one of In, NotIn",
        ),
        (
            container(
                "restartPolicy: Never\nrestartPolicyRules: [{action: Restart, exitCodes: {operator: In, values: []}}]",
            ),
            &format!("{rules}[0].exitCodes.values"),
            "has 0 entries; it needs 1 to 255",
        ),
        (
            container(
                "restartPolicy: Never\nrestartPolicyRules: [{action: Restart, exitCodes: {operator: In, values: [256]}}]",
            ),
            &format!("{rules}[0].exitCodes.values"),
            "256 is not an exit code",
        ),
    ]);
    let sidecar = init("restartPolicy: Always\nlivenessProbe: {exec: {command: [x]}}");
    assert_eq!(one(&sidecar).init_containers().len(), 1);
    let ports = "ports: [{containerPort: 80, hostPort: 80}]";
    let shared = container(ports) + &init(ports)[GOOD.len()..];
    assert_eq!(
        one(&shared).init_containers().len(),
        1,
        "one after the other"
    );
    let both = container(ports) + &init(&format!("restartPolicy: Always\n{ports}"))[GOOD.len()..];
    assert_says(
        &error(&both),
        &["spec.containers[0].ports[0].hostPort", "used twice"],
    );
}

#[test]
fn contradictions_of_security_are_explained() {
    let own = |fields: &str| container(&format!("securityContext: {{{fields}}}"));
    let pod = |fields: &str| spec(&format!("securityContext: {{{fields}}}"));
    let at = "spec.containers[0].securityContext";
    let all = "spec.securityContext";
    check(&[
        (
            own("privileged: true, allowPrivilegeEscalation: false"),
            &format!("{at}.allowPrivilegeEscalation"),
            "cannot be false beside privileged: true; remove one",
        ),
        (
            own("allowPrivilegeEscalation: false, capabilities: {add: [SYS_ADMIN]}"),
            &format!("{at}.allowPrivilegeEscalation"),
            "beside the capability SYS_ADMIN",
        ),
        (
            own("procMount: Unmasked"),
            &format!("{at}.procMount"),
            "needs spec.hostUsers: false",
        ),
        (
            own("procMount: Hidden"),
            &format!("{at}.procMount"),
            "is not one of Default, Unmasked",
        ),
        (
            own("capabilities: {add: [NET_ADMIN, FLY]}"),
            &format!("{at}.capabilities.add[1]"),
            "\"FLY\" is not a capability; write it like NET_ADMIN",
        ),
        (
            own("capabilities: {drop: ['']}"),
            &format!("{at}.capabilities.drop[0]"),
            "is not a capability",
        ),
        (
            own("runAsUser: -1"),
            &format!("{at}.runAsUser"),
            "-1 has to be between 0 and 2147483647",
        ),
        (
            own("runAsGroup: 2147483648"),
            &format!("{at}.runAsGroup"),
            "between 0 and",
        ),
        (
            own("seccompProfile: {type: Local}"),
            &format!("{at}.seccompProfile.type"),
            "is not one of RuntimeDefault",
        ),
        (
            own("seccompProfile: {type: Localhost}"),
            &format!("{at}.seccompProfile.localhostProfile"),
            "is missing; type Localhost names a profile",
        ),
        (
            own("seccompProfile: {type: Unconfined, localhostProfile: p}"),
            &format!("{at}.seccompProfile.localhostProfile"),
            "is for type Localhost only",
        ),
        (
            own("seccompProfile: {type: Localhost, localhostProfile: ../p}"),
            &format!("{at}.seccompProfile.localhostProfile"),
            "without `..`",
        ),
        (
            own("appArmorProfile: {type: Localhost}"),
            &format!("{at}.appArmorProfile.localhostProfile"),
            "is missing",
        ),
        (
            pod("fsGroup: -1"),
            &format!("{all}.fsGroup"),
            "between 0 and",
        ),
        (
            pod("supplementalGroups: [1, -1]"),
            &format!("{all}.supplementalGroups[1]"),
            "between 0 and",
        ),
        (
            pod("fsGroupChangePolicy: Never"),
            &format!("{all}.fsGroupChangePolicy"),
            "is not one of Always, OnRootMismatch",
        ),
        (
            pod("supplementalGroupsPolicy: None"),
            &format!("{all}.supplementalGroupsPolicy"),
            "is not one of Merge, Strict",
        ),
        (
            pod("sysctls: [{name: 'a b', value: '1'}]"),
            &format!("{all}.sysctls[0].name"),
            "is not a sysctl",
        ),
        (
            pod("sysctls: [{name: net.a, value: '1'}, {name: net/a, value: '2'}]"),
            &format!("{all}.sysctls[1].name"),
            "is set twice; keep one",
        ),
        (
            spec("hostPID: true\nshareProcessNamespace: true"),
            "spec.shareProcessNamespace",
            "cannot stand beside hostPID: true",
        ),
        (
            spec("hostUsers: false\nhostNetwork: true"),
            "spec.hostNetwork",
            "cannot stand beside hostUsers: false",
        ),
    ]);
    assert_eq!(
        one(&(own("procMount: Unmasked") + "  hostUsers: false\n"))
            .containers()
            .len(),
        1
    );
}

#[test]
fn resources_that_cannot_be_are_explained() {
    let own = |fields: &str| container(&format!("resources: {{{fields}}}"));
    let at = "spec.containers[0].resources";
    let with_pod = |own: &str, pod: &str| {
        container(&format!("resources: {{{own}}}")) + &format!("  resources: {{{pod}}}\n")
    };
    check(&[
        (
            own("requests: {memory: 2Gi}, limits: {memory: 1Gi}"),
            &format!("{at}.requests[memory]"),
            "is larger than the limit",
        ),
        (
            own("requests: {disk: 1}"),
            &format!("{at}.requests[disk]"),
            "there are cpu, memory, ephemeral-storage, hugepages-<size>",
        ),
        (
            own("requests: {cpu: 1, hugepages-2Mi: 2Mi}"),
            &format!("{at}.requests[hugepages-2Mi]"),
            "has no limit; set spec.containers[0].resources.limits[hugepages-2Mi] to the same amount",
        ),
        (
            own("requests: {cpu: 1, hugepages-2Mi: 2Mi}, limits: {hugepages-2Mi: 4Mi}"),
            &format!("{at}.requests[hugepages-2Mi]"),
            "has to equal the limit",
        ),
        (
            own("limits: {hugepages-2Mi: 2Mi}"),
            &format!("{at}.limits[hugepages-2Mi]"),
            "needs a request or limit of cpu or memory beside it",
        ),
        (
            own("requests: {example.com/a: 1}"),
            &format!("{at}.requests[example.com/a]"),
            "has no limit",
        ),
        (
            container("resizePolicy: [{resourceName: disk, restartPolicy: NotRequired}]"),
            "spec.containers[0].resizePolicy[0].resourceName",
            "\"disk\" is not one of cpu, memory",
        ),
        (
            container("resizePolicy: [{resourceName: cpu, restartPolicy: Always}]"),
            "spec.containers[0].resizePolicy[0].restartPolicy",
            "is not one of NotRequired, RestartContainer",
        ),
        (
            container(
                "resizePolicy: [{resourceName: cpu, restartPolicy: NotRequired}, {resourceName: cpu, restartPolicy: NotRequired}]",
            ),
            "spec.containers[0].resizePolicy[1].resourceName",
            "is used twice",
        ),
        (
            with_pod("requests: {cpu: 2}", "requests: {cpu: 1}"),
            "spec.resources.requests[cpu]",
            "is less than what the containers request together",
        ),
        (
            with_pod("requests: {cpu: 1}, limits: {cpu: 2}", "limits: {cpu: 1}"),
            "spec.containers[0].resources.limits[cpu]",
            "2 is more than the pod's spec.resources.limits[cpu]",
        ),
    ]);
    // Requests follow limits, so that these are wrong twice.
    for (text, part) in [
        (
            own("limits: {cpu: 1, hugepages-2Mi: 3Mi}"),
            "has to be a multiple of the page size 2Mi",
        ),
        (
            own("limits: {cpu: 1, hugepages-big: 3Mi}"),
            "\"big\" is not a page size",
        ),
        (
            own("limits: {cpu: 1, example.com/a: 0.5}"),
            "has to be a whole number",
        ),
        (
            spec("resources: {limits: {ephemeral-storage: 1Gi}}"),
            "there are cpu, memory, hugepages-<size>",
        ),
    ] {
        assert_says(&error(&text), &["line 10", ".limits[", part]);
    }
}

#[test]
fn identity_and_deadlines_are_checked() {
    check(&[
        (
            spec("activeDeadlineSeconds: 0"),
            "spec.activeDeadlineSeconds",
            "is 0; it has to be between 1 and 2147483647",
        ),
        (
            spec("activeDeadlineSeconds: -5"),
            "spec.activeDeadlineSeconds",
            "is -5",
        ),
        (
            spec("activeDeadlineSeconds: 2147483648"),
            "spec.activeDeadlineSeconds",
            "or left out",
        ),
        (
            spec("terminationGracePeriodSeconds: -1"),
            "spec.terminationGracePeriodSeconds",
            "is negative",
        ),
        (spec("hostname: A"), "spec.hostname", "DNS-1123 label"),
        (spec("subdomain: a.b"), "spec.subdomain", "DNS-1123 label"),
        (
            spec("hostnameOverride: a_b"),
            "spec.hostnameOverride",
            "DNS-1123 subdomain",
        ),
        (
            spec(&format!("hostnameOverride: {}", "a".repeat(65))),
            "spec.hostnameOverride",
            "longer than the 64 characters",
        ),
        (
            spec("hostnameOverride: a\nhostNetwork: true"),
            "spec.hostnameOverride",
            "beside hostNetwork: true",
        ),
        (
            spec("hostnameOverride: a\nsetHostnameAsFQDN: true"),
            "spec.hostnameOverride",
            "beside setHostnameAsFQDN: true",
        ),
        (
            spec("hostAliases: [{ip: here, hostnames: [a]}]"),
            "spec.hostAliases[0].ip",
            "\"here\" is not an IP address",
        ),
        (
            spec("hostAliases: [{ip: 127.0.0.1, hostnames: [a, A_b]}]"),
            "spec.hostAliases[0].hostnames[1]",
            "DNS-1123 subdomain",
        ),
        (
            spec("readinessGates: [{conditionType: 'is it?'}]"),
            "spec.readinessGates[0].conditionType",
            "is not a condition; write one like example.com/ready",
        ),
        (
            spec("volumes: [{name: v, image: {}}]"),
            "spec.volumes[0].image.reference",
            "is missing; name the image",
        ),
        (
            spec("volumes: [{name: v, image: {reference: r, pullPolicy: Maybe}}]"),
            "spec.volumes[0].image.pullPolicy",
            "is not one of Always",
        ),
    ]);
}

#[test]
fn probes_and_init_containers_get_their_defaults() {
    let pod = one(&container(
        "livenessProbe: {httpGet: {port: web}, periodSeconds: 3}\nlifecycle: {preStop: {httpGet: {port: 80}}}",
    ));
    let probe = pod.containers()[0].liveness_probe.as_ref().unwrap();
    let http = probe.http_get.as_ref().unwrap();
    assert_eq!(
        (http.path.as_deref(), http.scheme.as_deref()),
        (Some("/"), Some("HTTP"))
    );
    let numbers = [
        probe.timeout_seconds,
        probe.period_seconds,
        probe.success_threshold,
        probe.failure_threshold,
    ];
    assert_eq!(numbers, [Some(1), Some(3), Some(1), Some(3)]);
    let hook = pod.containers()[0]
        .lifecycle
        .as_ref()
        .unwrap()
        .pre_stop
        .as_ref();
    assert_eq!(
        hook.unwrap().http_get.as_ref().unwrap().path.as_deref(),
        Some("/")
    );

    let pod = one(&init("resources: {limits: {cpu: 1}}"));
    let first = &pod.init_containers()[0];
    assert_eq!(first.image_pull_policy.as_deref(), Some("IfNotPresent"));
    assert_eq!(first.termination_message_policy.as_deref(), Some("File"));
    let requests = first.resources.as_ref().unwrap().requests.as_ref().unwrap();
    assert_eq!(requests["cpu"].0, "1");

    let both = container("resources: {requests: {memory: 1Mi}}")
        + "  resources: {limits: {cpu: 1, memory: 1Gi}}\n";
    let pod = one(&both);
    let requests = pod
        .spec_ref()
        .resources
        .as_ref()
        .unwrap()
        .requests
        .as_ref()
        .unwrap();
    assert_eq!(requests["cpu"].0, "1");
    assert_eq!(
        requests.get("memory"),
        None,
        "the containers' request counts"
    );
}

#[test]
fn what_keeps_the_mirror_pod_away_is_told_with_the_manifest() {
    let toleration = |fields: &str| spec(&format!("tolerations: [{{{fields}}}]"));
    let mapped = "::ffff:10.0.0.1";
    let cases = [
        (
            spec("nodeSelector: {disk: a b}"),
            "spec.nodeSelector[disk]",
            "is not a label that a node can have",
        ),
        (
            spec("schedulingGates: [{name: example.com/wait}]"),
            "spec.schedulingGates",
            "has its node; remove them",
        ),
        (
            toleration("key: a b, operator: Exists"),
            "spec.tolerations[0].key",
            "is not the key of a taint",
        ),
        (
            toleration("key: a, value: b c"),
            "spec.tolerations[0].value",
            "is not the value of a taint",
        ),
        (
            toleration("key: a, operator: Exists, effect: NoSchedule, tolerationSeconds: 5"),
            "spec.tolerations[0].tolerationSeconds",
            "is for effect NoExecute only",
        ),
        (
            spec(&format!("dnsConfig: {{nameservers: ['{mapped}']}}")),
            "spec.dnsConfig.nameservers[0]",
            "is not an IP address in its own form",
        ),
        (
            spec("dnsConfig: {searches: [a b]}"),
            "spec.dnsConfig.searches[0]",
            "has to be a DNS-1123 subdomain",
        ),
        (
            spec("dnsConfig: {options: [{value: '2'}]}"),
            "spec.dnsConfig.options[0].name",
            "is missing",
        ),
        (
            spec(&format!(
                "hostAliases: [{{ip: '{mapped}', hostnames: [a]}}]"
            )),
            "spec.hostAliases[0].ip",
            "is not an IP address in its own form",
        ),
        (
            container("env: [{name: A, valueFrom: {}}]"),
            "spec.containers[0].env[0].valueFrom",
            "has 0 sources; a value comes from exactly one",
        ),
        (
            spec("os: {name: linux}\nsecurityContext: {windowsOptions: {hostProcess: false}}"),
            "spec.securityContext.windowsOptions",
            "cannot stand beside spec.os.name linux",
        ),
    ];
    check(&cases);
    // Taken by servers, too.
    one(&toleration(
        "key: a, operator: Exists, effect: NoExecute, tolerationSeconds: 5",
    ));
    one(&toleration(
        "key: example.com/a, value: b, effect: NoSchedule",
    ));
    one(&spec(
        "securityContext: {windowsOptions: {hostProcess: false}}",
    ));
}
