//! Layer 3: the API server. Owns how it is reached: credentials, limits, retries, and whether it answers.
//!
//! In: a kubeconfig. Out: [`ApiClient`], which every module that talks to the API server shares.

mod connection;
mod failure;
#[cfg(test)]
pub(crate) mod testkit;

pub use connection::{Connection, Reachability};
pub use failure::{Failure, pause};

/// A client of the API server. Cheap to clone.
#[derive(Clone)]
pub struct ApiClient {
    client: kube::Client,
    connection: Connection,
}

impl std::fmt::Debug for ApiClient {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ApiClient")
            .field("connection", &self.connection)
            .finish_non_exhaustive()
    }
}

impl ApiClient {
    /// A client whose requests report to `connection`.
    pub fn new(client: kube::Client, connection: Connection) -> Self {
        Self { client, connection }
    }

    /// For `kube::Api`.
    pub fn kube(&self) -> kube::Client {
        self.client.clone()
    }

    /// Whether the API server answers.
    pub fn connection(&self) -> &Connection {
        &self.connection
    }
}
