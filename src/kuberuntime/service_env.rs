//! Variables that name the services to containers; upstream's `envvars.FromServices` and
//! `getServiceEnvVarMap`. Pure.

use std::collections::BTreeMap;
use std::sync::Arc;

use k8s_openapi::api::core::v1::{Service, ServicePort};

/// The service of the API server, named to every pod.
const MASTER: (&str, &str) = ("default", "kubernetes");

/// The variables of a pod of `namespace`: services of its namespace when `links` says so, and the API
/// server's always.
pub fn service_env(
    services: &[Arc<Service>],
    namespace: &str,
    links: bool,
) -> BTreeMap<String, String> {
    let mut chosen: BTreeMap<&str, &Service> = BTreeMap::new();
    for service in services.iter().filter(|s| address(s).is_some()) {
        let own_namespace = service.metadata.namespace.as_deref().unwrap_or_default();
        let name = service.metadata.name.as_deref().unwrap_or_default();
        if (own_namespace, name) == MASTER {
            // One of the pod's own namespace goes before it.
            chosen.entry(name).or_insert(service);
        } else if links && own_namespace == namespace {
            chosen.insert(name, service);
        }
    }
    let mut env = BTreeMap::new();
    for (name, service) in chosen {
        add(&mut env, name, service);
    }
    env
}

/// Its address, unless it is headless or a name only.
fn address(service: &Service) -> Option<&str> {
    let spec = service.spec.as_ref()?;
    if spec.type_.as_deref() == Some("ExternalName") {
        return None;
    }
    spec.cluster_ip
        .as_deref()
        .filter(|ip| !ip.is_empty() && *ip != "None")
}

fn add(env: &mut BTreeMap<String, String>, name: &str, service: &Service) {
    let Some(ip) = address(service) else { return };
    let ports: &[ServicePort] = service
        .spec
        .as_ref()
        .and_then(|s| s.ports.as_deref())
        .unwrap_or_default();
    let Some(first) = ports.first() else { return };
    let prefix = variable(name);
    env.insert(format!("{prefix}_SERVICE_HOST"), ip.to_owned());
    env.insert(format!("{prefix}_SERVICE_PORT"), first.port.to_string());
    env.insert(format!("{prefix}_PORT"), url(ip, first));
    for port in ports {
        if let Some(name) = port.name.as_deref().filter(|n| !n.is_empty()) {
            env.insert(
                format!("{prefix}_SERVICE_PORT_{}", variable(name)),
                port.port.to_string(),
            );
        }
        let link = format!(
            "{prefix}_PORT_{}_{}",
            port.port,
            protocol(port).to_uppercase()
        );
        env.insert(format!("{link}_PROTO"), protocol(port).to_lowercase());
        env.insert(format!("{link}_PORT"), port.port.to_string());
        env.insert(format!("{link}_ADDR"), ip.to_owned());
        env.insert(link, url(ip, port));
    }
}

fn variable(name: &str) -> String {
    name.replace('-', "_").to_uppercase()
}

fn protocol(port: &ServicePort) -> &str {
    port.protocol
        .as_deref()
        .filter(|p| !p.is_empty())
        .unwrap_or("TCP")
}

fn url(ip: &str, port: &ServicePort) -> String {
    let protocol = protocol(port).to_lowercase();
    if ip.contains(':') {
        format!("{protocol}://[{ip}]:{}", port.port)
    } else {
        format!("{protocol}://{ip}:{}", port.port)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn service(namespace: &str, name: &str, spec: serde_json::Value) -> Arc<Service> {
        Arc::new(
            serde_json::from_value(
                json!({"metadata": {"namespace": namespace, "name": name}, "spec": spec}),
            )
            .unwrap(),
        )
    }

    fn cluster() -> Vec<Arc<Service>> {
        let one = json!([{"port": 443, "name": "https"}]);
        vec![
            service(
                "default",
                "kubernetes",
                json!({"clusterIP": "10.96.0.1", "ports": one}),
            ),
            service(
                "shop",
                "data-base",
                json!({"clusterIP": "fd00::5", "ports": [
                    {"port": 5432, "name": "p-sql"}, {"port": 53, "protocol": "UDP", "name": "dns"},
                ]}),
            ),
            service(
                "shop",
                "headless",
                json!({"clusterIP": "None", "ports": one}),
            ),
            service(
                "shop",
                "elsewhere",
                json!({"type": "ExternalName", "externalName": "x", "clusterIP": "", "ports": one}),
            ),
            service("shop", "portless", json!({"clusterIP": "10.96.0.9"})),
            service(
                "other",
                "secret-plans",
                json!({"clusterIP": "10.96.0.7", "ports": one}),
            ),
        ]
    }

    #[test]
    fn services_of_the_namespace_and_the_api_server_are_told() {
        let env = service_env(&cluster(), "shop", true);
        let lines: Vec<String> = env.iter().map(|(k, v)| format!("{k}={v}")).collect();
        assert_eq!(
            lines,
            [
                "DATA_BASE_PORT=tcp://[fd00::5]:5432",
                "DATA_BASE_PORT_53_UDP=udp://[fd00::5]:53",
                "DATA_BASE_PORT_53_UDP_ADDR=fd00::5",
                "DATA_BASE_PORT_53_UDP_PORT=53",
                "DATA_BASE_PORT_53_UDP_PROTO=udp",
                "DATA_BASE_PORT_5432_TCP=tcp://[fd00::5]:5432",
                "DATA_BASE_PORT_5432_TCP_ADDR=fd00::5",
                "DATA_BASE_PORT_5432_TCP_PORT=5432",
                "DATA_BASE_PORT_5432_TCP_PROTO=tcp",
                "DATA_BASE_SERVICE_HOST=fd00::5",
                "DATA_BASE_SERVICE_PORT=5432",
                "DATA_BASE_SERVICE_PORT_DNS=53",
                "DATA_BASE_SERVICE_PORT_P_SQL=5432",
                "KUBERNETES_PORT=tcp://10.96.0.1:443",
                "KUBERNETES_PORT_443_TCP=tcp://10.96.0.1:443",
                "KUBERNETES_PORT_443_TCP_ADDR=10.96.0.1",
                "KUBERNETES_PORT_443_TCP_PORT=443",
                "KUBERNETES_PORT_443_TCP_PROTO=tcp",
                "KUBERNETES_SERVICE_HOST=10.96.0.1",
                "KUBERNETES_SERVICE_PORT=443",
                "KUBERNETES_SERVICE_PORT_HTTPS=443",
            ]
        );
    }

    #[test]
    fn without_links_only_the_api_server_is_told() {
        let env = service_env(&cluster(), "shop", false);
        assert!(env.keys().all(|k| k.starts_with("KUBERNETES_")), "{env:?}");
        assert_eq!(env.len(), 8);
        assert_eq!(service_env(&cluster(), "other", true).len(), 16);
    }

    #[test]
    fn a_service_named_kubernetes_of_the_own_namespace_goes_before_the_api_servers() {
        let mut all = cluster();
        let own = service(
            "shop",
            "kubernetes",
            json!({"clusterIP": "10.1.1.1", "ports": [{"port": 1}]}),
        );
        all.push(own.clone());
        for all in [all.clone(), all.into_iter().rev().collect()] {
            let env = service_env(&all, "shop", true);
            assert_eq!(env["KUBERNETES_SERVICE_HOST"], "10.1.1.1");
            let env = service_env(&all, "shop", false);
            assert_eq!(env["KUBERNETES_SERVICE_HOST"], "10.96.0.1");
        }
    }
}
