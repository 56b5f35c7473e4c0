//! A server and the clients of one test.

use std::sync::Arc;

use holdfast_testkit::envtest::{EnvTest, unique_name};
use holdfast_testkit::fake_api::FakeApi;
use k8s_openapi::api::core::v1::{Namespace, Node};
use kube::api::{Api, PostParams};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

/// Names are of this test only: a real server may be shared by all of them.
pub(crate) struct World {
    pub(crate) admin: kube::Client,
    /// Client of the node [`World::node`].
    pub(crate) node_client: kube::Client,
    /// Client of the node [`World::other`].
    pub(crate) other_client: kube::Client,
    pub(crate) namespace: String,
    pub(crate) node: String,
    pub(crate) other: String,
    /// Goes with the last world on it.
    env: Option<Arc<EnvTest>>,
}

impl World {
    pub(crate) async fn fake() -> Self {
        let api = FakeApi::new();
        Self::of(api.client(), |node| api.client_as_node(node)).await
    }

    /// On a real server (`make envtest`).
    pub(crate) async fn real() -> Self {
        let env = EnvTest::shared();
        let mut world = Self::of(env.admin_client(), |node| env.node_client(node)).await;
        // Its service account: no controller makes one.
        env.namespace(&world.namespace);
        world.env = Some(env);
        world
    }

    /// On any server: `client_as_node` gives the client of a node by its name.
    pub(crate) async fn of(
        admin: kube::Client,
        client_as_node: impl Fn(&str) -> kube::Client,
    ) -> Self {
        let id = unique_name();
        let world = Self {
            node: format!("node-{id}"),
            other: format!("other-{id}"),
            namespace: format!("contract-{id}"),
            node_client: client_as_node(&format!("node-{id}")),
            other_client: client_as_node(&format!("other-{id}")),
            admin,
            env: None,
        };
        let namespace = object(json!({ "metadata": { "name": world.namespace } }));
        let namespaces: Api<Namespace> = Api::all(world.admin.clone());
        namespaces
            .create(&PostParams::default(), &namespace)
            .await
            .unwrap();
        let nodes: Api<Node> = Api::all(world.admin.clone());
        for name in [&world.node, &world.other] {
            let node = object(json!({ "metadata": { "name": name } }));
            nodes.create(&PostParams::default(), &node).await.unwrap();
        }
        world
    }

    pub(crate) fn api<K>(&self, client: &kube::Client) -> Api<K>
    where
        K: kube::Resource<DynamicType = (), Scope = k8s_openapi::NamespaceResourceScope>,
    {
        Api::namespaced(client.clone(), &self.namespace)
    }

    pub(crate) async fn create<K>(&self, value: Value) -> K
    where
        K: kube::Resource<DynamicType = (), Scope = k8s_openapi::NamespaceResourceScope>
            + Clone
            + Serialize
            + DeserializeOwned
            + std::fmt::Debug,
    {
        let api: Api<K> = self.api(&self.admin);
        api.create(&PostParams::default(), &object(value))
            .await
            .unwrap()
    }
}

pub(crate) fn object<K: DeserializeOwned>(value: Value) -> K {
    serde_json::from_value(value).unwrap()
}

/// A pod with one container on a node.
pub(crate) fn pod(name: &str, node: &str) -> Value {
    json!({
        "metadata": { "name": name },
        "spec": {
            "nodeName": node,
            "automountServiceAccountToken": false,
            "containers": [{ "name": "main", "image": "busybox:1" }],
        },
    })
}

/// HTTP status of a refusal.
#[track_caller]
pub(crate) fn refusal<T: std::fmt::Debug>(result: kube::Result<T>) -> u16 {
    match result {
        Err(kube::Error::Api(status)) => status.code,
        other => panic!("no refusal: {other:?}"),
    }
}
