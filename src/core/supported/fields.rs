//! The rules, field by field. `docs/pod-fields.md` lists the same for users; `tests/pod_fields.rs` compares
//! the two, and both with the API.

use std::collections::BTreeMap;

use super::EXTENDED;
use super::Rule::{self, Amounts, Any, Inside, No, Text, Tree};

const LATER: &str = "Fibre Channel is not there yet; use a CSI driver";
const DRIVER: &str = "Kubernetes has given this volume up for CSI drivers";
/// Resources that a container may ask for.
const OF_CONTAINERS: &[&str] = &["cpu", "memory", "hugepages-", "ephemeral-storage", EXTENDED];
const POD_CLAIMS: &str = "claims are named by containers";
const BARE: &str = "an ephemeral container is started once and has none of this";

/// All rules by full path.
pub(super) fn all() -> BTreeMap<String, Rule> {
    let mut rules = BTreeMap::new();
    let mut add = |prefix: &str, table: &[(&str, Rule)]| {
        for (path, rule) in table {
            rules.insert(format!("{prefix}{path}"), *rule);
        }
    };
    add("", POD);
    for list in ["containers", "initContainers", "ephemeralContainers"] {
        let member = format!("spec.{list}[]");
        add(&member, CONTAINER);
        if list == "ephemeralContainers" {
            add(&member, EPHEMERAL);
            continue;
        }
        add(&member, RESTARTED);
        for probe in ["livenessProbe", "readinessProbe", "startupProbe"] {
            add(&format!("{member}.{probe}"), PROBE);
        }
        for hook in ["postStart", "preStop"] {
            add(&format!("{member}.lifecycle.{hook}"), HANDLER);
        }
    }
    for context in [
        "spec.securityContext",
        "spec.containers[].securityContext",
        "spec.initContainers[].securityContext",
        "spec.ephemeralContainers[].securityContext",
    ] {
        add(context, SECURITY);
    }
    for volume in ["spec.volumes[]", "spec.volumes[].projected.sources[]"] {
        add(volume, FILES);
    }
    rules
}

const POD: &[(&str, Rule)] = &[
    ("apiVersion", Any),
    ("kind", Any),
    ("metadata", Inside),
    ("metadata.annotations", Any),
    ("metadata.creationTimestamp", Any),
    ("metadata.deletionGracePeriodSeconds", Any),
    ("metadata.deletionTimestamp", Any),
    ("metadata.finalizers", Any),
    ("metadata.generateName", Any),
    ("metadata.generation", Any),
    ("metadata.labels", Any),
    ("metadata.managedFields", Tree),
    ("metadata.name", Any),
    ("metadata.namespace", Any),
    ("metadata.ownerReferences", Tree),
    ("metadata.resourceVersion", Any),
    ("metadata.selfLink", Any),
    ("metadata.uid", Any),
    // Reported, not asked for.
    ("status", Tree),
    ("spec", Inside),
    ("spec.activeDeadlineSeconds", Any),
    // The scheduler's and admission's business.
    ("spec.affinity", Tree),
    // The API server has made a volume of it.
    ("spec.automountServiceAccountToken", Any),
    ("spec.containers", Inside),
    ("spec.dnsConfig", Inside),
    ("spec.dnsConfig.nameservers", Any),
    ("spec.dnsConfig.options", Inside),
    ("spec.dnsConfig.options[]", Inside),
    ("spec.dnsConfig.options[].name", Any),
    ("spec.dnsConfig.options[].value", Any),
    ("spec.dnsConfig.searches", Any),
    (
        "spec.dnsPolicy",
        Text(&["ClusterFirst", "ClusterFirstWithHostNet", "Default", "None"]),
    ),
    ("spec.enableServiceLinks", Any),
    ("spec.ephemeralContainers", Inside),
    ("spec.hostAliases", Inside),
    ("spec.hostAliases[]", Inside),
    ("spec.hostAliases[].hostnames", Any),
    ("spec.hostAliases[].ip", Any),
    ("spec.hostIPC", Any),
    ("spec.hostNetwork", Any),
    ("spec.hostPID", Any),
    ("spec.hostUsers", Any),
    ("spec.hostname", Any),
    ("spec.hostnameOverride", Any),
    ("spec.imagePullSecrets", Inside),
    ("spec.imagePullSecrets[]", Inside),
    ("spec.imagePullSecrets[].name", Any),
    ("spec.initContainers", Inside),
    ("spec.nodeName", Any),
    // Admission looks at it.
    ("spec.nodeSelector", Any),
    ("spec.os", Inside),
    // Admission refuses other systems, with a reason of their own.
    ("spec.os.name", Any),
    // Given by the RuntimeClass.
    ("spec.overhead", Any),
    // The scheduler's business; the node never acts on it.
    (
        "spec.preemptionPolicy",
        Text(&["PreemptLowerPriority", "Never"]),
    ),
    ("spec.priority", Any),
    ("spec.priorityClassName", Any),
    ("spec.readinessGates", Inside),
    ("spec.readinessGates[]", Inside),
    ("spec.readinessGates[].conditionType", Any),
    ("spec.resourceClaims", Inside),
    ("spec.resourceClaims[]", Inside),
    ("spec.resourceClaims[].name", Any),
    ("spec.resourceClaims[].resourceClaimName", Any),
    ("spec.resourceClaims[].resourceClaimTemplateName", Any),
    ("spec.resources", Inside),
    ("spec.resources.claims", No(POD_CLAIMS)),
    (
        "spec.resources.limits",
        Amounts(&["cpu", "memory", "hugepages-"]),
    ),
    (
        "spec.resources.requests",
        Amounts(&["cpu", "memory", "hugepages-"]),
    ),
    (
        "spec.restartPolicy",
        Text(&["Always", "OnFailure", "Never"]),
    ),
    ("spec.runtimeClassName", Any),
    ("spec.schedulerName", Any),
    // A pod with gates is not bound to a node.
    ("spec.schedulingGates", Tree),
    ("spec.schedulingGroup", Tree),
    ("spec.securityContext.fsGroup", Any),
    (
        "spec.securityContext.fsGroupChangePolicy",
        Text(&["Always", "OnRootMismatch"]),
    ),
    (
        "spec.securityContext.seLinuxChangePolicy",
        Text(&["MountOption", "Recursive"]),
    ),
    ("spec.securityContext.supplementalGroups", Any),
    (
        "spec.securityContext.supplementalGroupsPolicy",
        Text(&["Merge", "Strict"]),
    ),
    ("spec.securityContext.sysctls", Inside),
    ("spec.securityContext.sysctls[]", Inside),
    ("spec.securityContext.sysctls[].name", Any),
    ("spec.securityContext.sysctls[].value", Any),
    // The same as serviceAccountName, by its former name.
    ("spec.serviceAccount", Any),
    ("spec.serviceAccountName", Any),
    ("spec.setHostnameAsFQDN", Any),
    ("spec.shareProcessNamespace", Any),
    ("spec.subdomain", Any),
    ("spec.terminationGracePeriodSeconds", Any),
    ("spec.tolerations", Inside),
    ("spec.tolerations[]", Inside),
    ("spec.tolerations[].effect", Any),
    ("spec.tolerations[].key", Any),
    ("spec.tolerations[].operator", Text(&["Equal", "Exists"])),
    ("spec.tolerations[].tolerationSeconds", Any),
    ("spec.tolerations[].value", Any),
    // The scheduler's business; the node never acts on it.
    ("spec.topologySpreadConstraints", Tree),
    ("spec.volumes", Inside),
    ("spec.volumes[]", Inside),
    ("spec.volumes[].awsElasticBlockStore", No(DRIVER)),
    ("spec.volumes[].azureDisk", No(DRIVER)),
    ("spec.volumes[].azureFile", No(DRIVER)),
    ("spec.volumes[].cephfs", No(DRIVER)),
    ("spec.volumes[].cinder", No(DRIVER)),
    ("spec.volumes[].configMap.defaultMode", Any),
    ("spec.volumes[].csi", Inside),
    ("spec.volumes[].csi.driver", Any),
    ("spec.volumes[].csi.fsType", Any),
    ("spec.volumes[].csi.nodePublishSecretRef", Inside),
    ("spec.volumes[].csi.nodePublishSecretRef.name", Any),
    ("spec.volumes[].csi.readOnly", Any),
    ("spec.volumes[].csi.volumeAttributes", Any),
    ("spec.volumes[].downwardAPI.defaultMode", Any),
    ("spec.volumes[].emptyDir", Inside),
    (
        "spec.volumes[].emptyDir.medium",
        Text(&["Memory", "HugePages", "HugePages-"]),
    ),
    ("spec.volumes[].emptyDir.sizeLimit", Any),
    ("spec.volumes[].ephemeral", Inside),
    // A controller makes a claim of it; the node looks at the claim.
    ("spec.volumes[].ephemeral.volumeClaimTemplate", Tree),
    ("spec.volumes[].fc", No(LATER)),
    ("spec.volumes[].flexVolume", No(DRIVER)),
    ("spec.volumes[].flocker", No(DRIVER)),
    ("spec.volumes[].gcePersistentDisk", No(DRIVER)),
    (
        "spec.volumes[].gitRepo",
        No("Kubernetes has given it up as unsafe; clone in an init container"),
    ),
    ("spec.volumes[].glusterfs", No(DRIVER)),
    ("spec.volumes[].hostPath", Inside),
    ("spec.volumes[].hostPath.path", Any),
    ("spec.volumes[].hostPath.type", Any),
    ("spec.volumes[].image", Inside),
    (
        "spec.volumes[].image.pullPolicy",
        Text(&["Always", "IfNotPresent", "Never"]),
    ),
    ("spec.volumes[].image.reference", Any),
    ("spec.volumes[].iscsi", Inside),
    ("spec.volumes[].iscsi.chapAuthDiscovery", Any),
    ("spec.volumes[].iscsi.chapAuthSession", Any),
    ("spec.volumes[].iscsi.fsType", Any),
    ("spec.volumes[].iscsi.initiatorName", Any),
    ("spec.volumes[].iscsi.iqn", Any),
    ("spec.volumes[].iscsi.iscsiInterface", Any),
    ("spec.volumes[].iscsi.lun", Any),
    ("spec.volumes[].iscsi.portals", Any),
    ("spec.volumes[].iscsi.readOnly", Any),
    ("spec.volumes[].iscsi.secretRef", Inside),
    ("spec.volumes[].iscsi.secretRef.name", Any),
    ("spec.volumes[].iscsi.targetPortal", Any),
    ("spec.volumes[].name", Any),
    ("spec.volumes[].nfs", Inside),
    ("spec.volumes[].nfs.path", Any),
    ("spec.volumes[].nfs.readOnly", Any),
    ("spec.volumes[].nfs.server", Any),
    ("spec.volumes[].persistentVolumeClaim", Inside),
    ("spec.volumes[].persistentVolumeClaim.claimName", Any),
    ("spec.volumes[].persistentVolumeClaim.readOnly", Any),
    ("spec.volumes[].photonPersistentDisk", No(DRIVER)),
    ("spec.volumes[].portworxVolume", No(DRIVER)),
    ("spec.volumes[].projected", Inside),
    ("spec.volumes[].projected.defaultMode", Any),
    ("spec.volumes[].projected.sources", Inside),
    ("spec.volumes[].projected.sources[]", Inside),
    (
        "spec.volumes[].projected.sources[].clusterTrustBundle",
        Inside,
    ),
    (
        "spec.volumes[].projected.sources[].clusterTrustBundle.labelSelector",
        Inside,
    ),
    (
        "spec.volumes[].projected.sources[].clusterTrustBundle.labelSelector.matchExpressions",
        Inside,
    ),
    (
        "spec.volumes[].projected.sources[].clusterTrustBundle.labelSelector.matchExpressions[]",
        Inside,
    ),
    (
        "spec.volumes[].projected.sources[].clusterTrustBundle.labelSelector.matchExpressions[].key",
        Any,
    ),
    (
        "spec.volumes[].projected.sources[].clusterTrustBundle.labelSelector.matchExpressions[].operator",
        Text(&["DoesNotExist", "Exists", "In", "NotIn"]),
    ),
    (
        "spec.volumes[].projected.sources[].clusterTrustBundle.labelSelector.matchExpressions[].values",
        Any,
    ),
    (
        "spec.volumes[].projected.sources[].clusterTrustBundle.labelSelector.matchLabels",
        Any,
    ),
    (
        "spec.volumes[].projected.sources[].clusterTrustBundle.name",
        Any,
    ),
    (
        "spec.volumes[].projected.sources[].clusterTrustBundle.optional",
        Any,
    ),
    (
        "spec.volumes[].projected.sources[].clusterTrustBundle.path",
        Any,
    ),
    (
        "spec.volumes[].projected.sources[].clusterTrustBundle.signerName",
        Any,
    ),
    ("spec.volumes[].projected.sources[].podCertificate", Inside),
    (
        "spec.volumes[].projected.sources[].podCertificate.certificateChainPath",
        Any,
    ),
    (
        "spec.volumes[].projected.sources[].podCertificate.credentialBundlePath",
        Any,
    ),
    (
        "spec.volumes[].projected.sources[].podCertificate.keyPath",
        Any,
    ),
    (
        "spec.volumes[].projected.sources[].podCertificate.keyType",
        Text(&[
            "RSA3072",
            "RSA4096",
            "ECDSAP256",
            "ECDSAP384",
            "ECDSAP521",
            "ED25519",
        ]),
    ),
    (
        "spec.volumes[].projected.sources[].podCertificate.maxExpirationSeconds",
        Any,
    ),
    (
        "spec.volumes[].projected.sources[].podCertificate.signerName",
        Any,
    ),
    (
        "spec.volumes[].projected.sources[].podCertificate.userAnnotations",
        Any,
    ),
    ("spec.volumes[].projected.sources[].secret.name", Any),
    (
        "spec.volumes[].projected.sources[].serviceAccountToken",
        Inside,
    ),
    (
        "spec.volumes[].projected.sources[].serviceAccountToken.audience",
        Any,
    ),
    (
        "spec.volumes[].projected.sources[].serviceAccountToken.expirationSeconds",
        Any,
    ),
    (
        "spec.volumes[].projected.sources[].serviceAccountToken.path",
        Any,
    ),
    ("spec.volumes[].quobyte", No(DRIVER)),
    ("spec.volumes[].rbd", No(DRIVER)),
    ("spec.volumes[].scaleIO", No(DRIVER)),
    ("spec.volumes[].secret.defaultMode", Any),
    ("spec.volumes[].secret.secretName", Any),
    ("spec.volumes[].storageos", No(DRIVER)),
    ("spec.volumes[].vsphereVolume", No(DRIVER)),
];

/// Fields of containers in all three lists.
const CONTAINER: &[(&str, Rule)] = &[
    ("", Inside),
    (".args", Any),
    (".command", Any),
    (".env", Inside),
    (".env[]", Inside),
    (".env[].name", Any),
    (".env[].value", Any),
    (".env[].valueFrom", Inside),
    (".env[].valueFrom.configMapKeyRef", Inside),
    (".env[].valueFrom.configMapKeyRef.key", Any),
    (".env[].valueFrom.configMapKeyRef.name", Any),
    (".env[].valueFrom.configMapKeyRef.optional", Any),
    (".env[].valueFrom.fieldRef", Inside),
    (".env[].valueFrom.fieldRef.apiVersion", Any),
    (".env[].valueFrom.fieldRef.fieldPath", Any),
    (".env[].valueFrom.fileKeyRef", Inside),
    (".env[].valueFrom.fileKeyRef.key", Any),
    (".env[].valueFrom.fileKeyRef.optional", Any),
    (".env[].valueFrom.fileKeyRef.path", Any),
    (".env[].valueFrom.fileKeyRef.volumeName", Any),
    (".env[].valueFrom.resourceFieldRef", Inside),
    (".env[].valueFrom.resourceFieldRef.containerName", Any),
    (".env[].valueFrom.resourceFieldRef.divisor", Any),
    (".env[].valueFrom.resourceFieldRef.resource", Any),
    (".env[].valueFrom.secretKeyRef", Inside),
    (".env[].valueFrom.secretKeyRef.key", Any),
    (".env[].valueFrom.secretKeyRef.name", Any),
    (".env[].valueFrom.secretKeyRef.optional", Any),
    (".envFrom", Inside),
    (".envFrom[]", Inside),
    (".envFrom[].configMapRef", Inside),
    (".envFrom[].configMapRef.name", Any),
    (".envFrom[].configMapRef.optional", Any),
    (".envFrom[].prefix", Any),
    (".envFrom[].secretRef", Inside),
    (".envFrom[].secretRef.name", Any),
    (".envFrom[].secretRef.optional", Any),
    (".image", Any),
    (
        ".imagePullPolicy",
        Text(&["Always", "IfNotPresent", "Never"]),
    ),
    (".name", Any),
    (".securityContext.allowPrivilegeEscalation", Any),
    (".securityContext.capabilities", Inside),
    (".securityContext.capabilities.add", Any),
    (".securityContext.capabilities.drop", Any),
    (".securityContext.privileged", Any),
    (".securityContext.procMount", Text(&["Default", "Unmasked"])),
    (".securityContext.readOnlyRootFilesystem", Any),
    (".stdin", Any),
    (".stdinOnce", Any),
    (".terminationMessagePath", Any),
    (
        ".terminationMessagePolicy",
        Text(&["File", "FallbackToLogsOnError"]),
    ),
    (".tty", Any),
    (".volumeDevices", Inside),
    (".volumeDevices[]", Inside),
    (".volumeDevices[].devicePath", Any),
    (".volumeDevices[].name", Any),
    (".volumeMounts", Inside),
    (".volumeMounts[]", Inside),
    (".volumeMounts[].mountPath", Any),
    (
        ".volumeMounts[].mountPropagation",
        Text(&["None", "HostToContainer", "Bidirectional"]),
    ),
    (".volumeMounts[].name", Any),
    (".volumeMounts[].readOnly", Any),
    (
        ".volumeMounts[].recursiveReadOnly",
        Text(&["Disabled", "IfPossible", "Enabled"]),
    ),
    (".volumeMounts[].subPath", Any),
    (".volumeMounts[].subPathExpr", Any),
    (".workingDir", Any),
];

/// Further fields of containers and init containers.
const RESTARTED: &[(&str, Rule)] = &[
    (".lifecycle", Inside),
    // A runtime that does not know it is found out when the container is made.
    (".lifecycle.stopSignal", Any),
    (".ports", Inside),
    (".ports[]", Inside),
    (".ports[].containerPort", Any),
    (".ports[].hostIP", Any),
    (".ports[].hostPort", Any),
    (".ports[].name", Any),
    (".ports[].protocol", Text(&["TCP", "UDP", "SCTP"])),
    (".resizePolicy", Inside),
    (".resizePolicy[]", Inside),
    (".resizePolicy[].resourceName", Text(&["cpu", "memory"])),
    (
        ".resizePolicy[].restartPolicy",
        Text(&["NotRequired", "RestartContainer"]),
    ),
    (".resources", Inside),
    (".resources.claims", Inside),
    (".resources.claims[]", Inside),
    (".resources.claims[].name", Any),
    (".resources.claims[].request", Any),
    (".resources.limits", Amounts(OF_CONTAINERS)),
    (".resources.requests", Amounts(OF_CONTAINERS)),
    (".restartPolicy", Text(&["Always", "OnFailure", "Never"])),
    (".restartPolicyRules", Inside),
    (".restartPolicyRules[]", Inside),
    (
        ".restartPolicyRules[].action",
        Text(&["Restart", "RestartAllContainers"]),
    ),
    (".restartPolicyRules[].exitCodes", Inside),
    (
        ".restartPolicyRules[].exitCodes.operator",
        Text(&["In", "NotIn"]),
    ),
    (".restartPolicyRules[].exitCodes.values", Any),
];

/// Ephemeral containers beside what all have.
const EPHEMERAL: &[(&str, Rule)] = &[
    (".lifecycle", No(BARE)),
    (".livenessProbe", No(BARE)),
    (".ports", No(BARE)),
    (".readinessProbe", No(BARE)),
    (".resizePolicy", No(BARE)),
    (".resources", No(BARE)),
    (".restartPolicy", No(BARE)),
    (".restartPolicyRules", No(BARE)),
    (".startupProbe", No(BARE)),
    (".targetContainerName", Any),
];

const PROBE: &[(&str, Rule)] = &[
    ("", Inside),
    (".exec", Inside),
    (".exec.command", Any),
    (".failureThreshold", Any),
    (".grpc", Inside),
    (".grpc.port", Any),
    (".grpc.service", Any),
    (".httpGet", Inside),
    (".httpGet.host", Any),
    (".httpGet.httpHeaders", Inside),
    (".httpGet.httpHeaders[]", Inside),
    (".httpGet.httpHeaders[].name", Any),
    (".httpGet.httpHeaders[].value", Any),
    (".httpGet.path", Any),
    (".httpGet.port", Any),
    (".httpGet.scheme", Text(&["HTTP", "HTTPS"])),
    (".initialDelaySeconds", Any),
    (".periodSeconds", Any),
    (".successThreshold", Any),
    (".tcpSocket", Inside),
    (".tcpSocket.host", Any),
    (".tcpSocket.port", Any),
    (".terminationGracePeriodSeconds", Any),
    (".timeoutSeconds", Any),
];

const HANDLER: &[(&str, Rule)] = &[
    ("", Inside),
    (".exec", Inside),
    (".exec.command", Any),
    (".httpGet", Inside),
    (".httpGet.host", Any),
    (".httpGet.httpHeaders", Inside),
    (".httpGet.httpHeaders[]", Inside),
    (".httpGet.httpHeaders[].name", Any),
    (".httpGet.httpHeaders[].value", Any),
    (".httpGet.path", Any),
    (".httpGet.port", Any),
    (".httpGet.scheme", Text(&["HTTP", "HTTPS"])),
    (".sleep", Inside),
    (".sleep.seconds", Any),
    (
        ".tcpSocket",
        No("a hook is exec, httpGet or sleep; the API has this field for old manifests only"),
    ),
];

/// Common fields of a pod's and a container's security context.
const SECURITY: &[(&str, Rule)] = &[
    ("", Inside),
    (".appArmorProfile", Inside),
    (".appArmorProfile.localhostProfile", Any),
    (
        ".appArmorProfile.type",
        Text(&["RuntimeDefault", "Localhost", "Unconfined"]),
    ),
    (".runAsGroup", Any),
    (".runAsNonRoot", Any),
    (".runAsUser", Any),
    (".seLinuxOptions", Inside),
    (".seLinuxOptions.level", Any),
    (".seLinuxOptions.role", Any),
    (".seLinuxOptions.type", Any),
    (".seLinuxOptions.user", Any),
    (".seccompProfile", Inside),
    (".seccompProfile.localhostProfile", Any),
    (
        ".seccompProfile.type",
        Text(&["RuntimeDefault", "Localhost", "Unconfined"]),
    ),
    // Only a node that runs Windows acts on it.
    (".windowsOptions", Tree),
];

/// Common fields of a volume and a source of a projected volume.
const FILES: &[(&str, Rule)] = &[
    (".configMap", Inside),
    (".configMap.items", Inside),
    (".configMap.items[]", Inside),
    (".configMap.items[].key", Any),
    (".configMap.items[].mode", Any),
    (".configMap.items[].path", Any),
    (".configMap.name", Any),
    (".configMap.optional", Any),
    (".downwardAPI", Inside),
    (".downwardAPI.items", Inside),
    (".downwardAPI.items[]", Inside),
    (".downwardAPI.items[].fieldRef", Inside),
    (".downwardAPI.items[].fieldRef.apiVersion", Any),
    (".downwardAPI.items[].fieldRef.fieldPath", Any),
    (".downwardAPI.items[].mode", Any),
    (".downwardAPI.items[].path", Any),
    (".downwardAPI.items[].resourceFieldRef", Inside),
    (".downwardAPI.items[].resourceFieldRef.containerName", Any),
    (".downwardAPI.items[].resourceFieldRef.divisor", Any),
    (".downwardAPI.items[].resourceFieldRef.resource", Any),
    (".secret", Inside),
    (".secret.items", Inside),
    (".secret.items[]", Inside),
    (".secret.items[].key", Any),
    (".secret.items[].mode", Any),
    (".secret.items[].path", Any),
    (".secret.optional", Any),
];
