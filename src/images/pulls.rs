//! Pulls in flight: one per image and credentials, at most so many at once.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures::FutureExt;
use futures::future::{BoxFuture, Shared, WeakShared};
use k8s_cri::v1;
use tokio::sync::Semaphore;

use super::ImageService;
use super::fallback::Outages;
use super::keyring::{Credentials, fingerprint};
use crate::kuberuntime::cri::CriError;

/// Pulls that are kept go on for so long without anybody who waits.
const KEPT: Duration = Duration::from_secs(60);

/// Settings for the concurrency of pulls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ImageConfig {
    /// `serializeImagePulls`: one at a time.
    pub serialize_pulls: bool,
    /// `maxParallelImagePulls`, when they are not serialised.
    pub max_parallel: Option<usize>,
}

impl Default for ImageConfig {
    fn default() -> Self {
        Self {
            serialize_pulls: true,
            max_parallel: None,
        }
    }
}

/// A pull to make.
#[derive(Clone, Debug)]
pub(super) struct Wanted {
    pub(super) image: String,
    /// To be tried in this order; none = without.
    pub(super) credentials: Vec<Credentials>,
    pub(super) sandbox: Option<v1::PodSandboxConfig>,
}

/// A pull that succeeded.
#[derive(Clone, Debug)]
pub(super) struct Pulled {
    /// Reference by which the runtime keeps the image.
    pub(super) reference: String,
    /// ID of the image.
    pub(super) id: String,
    /// Index of the credentials that the registry accepted; `None` if none were needed.
    pub(super) used: Option<usize>,
    /// Size in bytes, 0 when the runtime does not say.
    pub(super) size: u64,
    /// Duration without the wait for other pulls.
    pub(super) took: Duration,
}

pub(super) type PullResult = Result<Pulled, Arc<CriError>>;
type PullFuture = BoxFuture<'static, PullResult>;
/// Image and credentials: nobody gets an image by a pull that others had the right to.
type PullKey = (String, [u8; 32]);

/// The pulls in flight. An entry does not keep its pull alive: that do those who wait for it.
pub(super) struct Pulls {
    slots: Option<Arc<Semaphore>>,
    outages: Arc<Outages>,
    in_flight: Mutex<HashMap<PullKey, WeakShared<PullFuture>>>,
}

impl Pulls {
    pub(super) fn new(config: ImageConfig, outages: Arc<Outages>) -> Self {
        let slots = if config.serialize_pulls {
            Some(1)
        } else {
            config.max_parallel.map(|n| n.max(1))
        };
        Self {
            slots: slots.map(|n| Arc::new(Semaphore::new(n))),
            outages,
            in_flight: Mutex::default(),
        }
    }

    /// Joins the pull of this image with these credentials that is in flight, or begins one.
    pub(super) async fn pull<S: ImageService>(&self, service: &S, want: Wanted) -> PullResult {
        self.join(service, want).await
    }

    /// Returns a future that keeps the pulls in flight going for a minute, whoever waits for them.
    pub(super) fn keep(&self) -> impl Future<Output = ()> + Send + use<> {
        let in_flight = match self.in_flight.lock() {
            Ok(map) => map,
            Err(poisoned) => poisoned.into_inner(),
        };
        let pulls: Vec<_> = in_flight.values().filter_map(WeakShared::upgrade).collect();
        async move {
            let all = futures::future::join_all(pulls);
            drop(tokio::time::timeout(KEPT, all).await);
        }
    }

    fn join<S: ImageService>(&self, service: &S, want: Wanted) -> Shared<PullFuture> {
        let key = (want.image.clone(), fingerprint(&want.credentials));
        // A poisoned map is as good as any: entries are replaced whole.
        let mut in_flight = match self.in_flight.lock() {
            Ok(map) => map,
            Err(poisoned) => poisoned.into_inner(),
        };
        // `peek` is set once a pull has finished: its result is not for those who come later.
        if let Some(pull) = in_flight.get(&key).and_then(WeakShared::upgrade)
            && pull.peek().is_none()
        {
            return pull;
        }
        in_flight.retain(|_, pull| pull.upgrade().is_some_and(|p| p.peek().is_none()));
        let pull = run(
            service.clone(),
            want,
            self.slots.clone(),
            Arc::clone(&self.outages),
        )
        .boxed()
        .shared();
        if let Some(weak) = pull.downgrade() {
            in_flight.insert(key, weak);
        }
        pull
    }
}

async fn run<S: ImageService>(
    service: S,
    want: Wanted,
    slots: Option<Arc<Semaphore>>,
    outages: Arc<Outages>,
) -> PullResult {
    // Neither with a slot nor as the silence of a registry.
    service.before_pulls(&want.image).await.map_err(Arc::new)?;
    let _slot = match slots {
        // The semaphore is never closed; if it were, pulls would go unlimited rather than fail.
        Some(slots) => slots.acquire_owned().await.ok(),
        None => None,
    };
    let begun = tokio::time::Instant::now();
    let spec = v1::ImageSpec {
        image: want.image.clone(),
        ..Default::default()
    };
    let pull = pull_with_any(&service, &want, spec);
    let (reference, used) = outages
        .watch(&want.image, &service, pull)
        .await
        .map_err(Arc::new)?;
    let took = begun.elapsed();
    let found = match service.image_status(&reference).await {
        Ok(found) => found,
        Err(error) => {
            tracing::debug!(image = want.image, %error, "the size of a pulled image is unknown");
            None
        }
    };
    let (id, size) = match found {
        Some(image) => (image.id, image.size),
        None => (reference.clone(), 0),
    };
    Ok(Pulled {
        reference,
        id,
        used,
        size,
        took,
    })
}

/// Tries the credentials in their order until the registry takes one. Upstream's `PullImage`.
async fn pull_with_any<S: ImageService>(
    service: &S,
    want: &Wanted,
    spec: v1::ImageSpec,
) -> Result<(String, Option<usize>), CriError> {
    let mut errors: Vec<CriError> = Vec::new();
    for (index, credentials) in want.credentials.iter().enumerate() {
        let auth = Some(credentials.auth_config());
        match service
            .pull_image(spec.clone(), auth, want.sandbox.clone())
            .await
        {
            Ok(reference) => return Ok((reference, Some(index))),
            Err(error) => errors.push(error),
        }
    }
    let Some(mut last) = errors.pop() else {
        let reference = service.pull_image(spec, None, want.sandbox.clone()).await?;
        return Ok((reference, None));
    };
    if !errors.is_empty() {
        let mut all: Vec<&str> = errors.iter().map(|e| e.message.as_str()).collect();
        all.push(&last.message);
        all.dedup();
        last.message = match all.as_slice() {
            [one] => (*one).to_owned(),
            all => format!("[{}]", all.join(", ")),
        };
    }
    Err(last)
}
