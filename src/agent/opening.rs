//! Opening the store: this boot, the store's directory, what is told of its state.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use tracing::{info, warn};

use super::base::{Base, Parts};
use super::{AgentError, RunOptions, cluster, root_dir, tasks};
use crate::apiserver::ApiClient;
use crate::core::state::EpochReason;
use crate::kubeletconfig::AgentConfig;
use crate::store::ballast::{self, Ballast};
use crate::store::open::{OpenError, OpenOptions, OpenReport, Opened, Outcome as OpenOutcome};
use crate::store::recover::Identity;
use crate::store::{Store, StoreOptions, open as open_store};
use crate::types::metrics::Metrics;
use crate::types::{BootIdentity, Clock, Event, EventRecorder, EventType, SystemClock, boot};

/// This boot, and the clock that goes with it.
pub(super) fn boot(config: &AgentConfig, options: &RunOptions) -> (BootIdentity, Arc<dyn Clock>) {
    let runtime_dir = config.runtime_endpoint.path().parent().map(Path::to_owned);
    let boot = BootIdentity::read(options.boot_id.as_deref(), runtime_dir.as_deref());
    let clock = Arc::new(SystemClock::new(boot.id()));
    (boot, clock)
}

/// Opens the store and starts its writer.
pub(super) async fn open(
    config: &AgentConfig,
    api: Option<ApiClient>,
    clock: Arc<dyn Clock>,
    boot: BootIdentity,
    metrics: Metrics,
) -> Result<Base, AgentError> {
    let node_root = config.root_dir.clone();
    let found = cluster::find(config.into(), config.state_dir.clone(), api.as_ref()).await;
    let at_start = found.cluster.clone();
    let mut open_options = OpenOptions {
        node_was_used: false,
        dir: config.state_dir.clone(),
        identity: Identity {
            node_name: config.node_name.clone(),
            machine_id: boot::machine_id_of(&config.state_dir),
            boot: boot.clone(),
        },
        sled: crate::store::backend::SledOptions::default(),
        now: clock.now(),
    };
    let (
        former,
        claimed,
        Opened {
            backend,
            loaded,
            report,
        },
    ) = tasks::patiently(
        tokio::task::spawn_blocking(move || {
            let (dir, now) = (&open_options.dir, open_options.now);
            let former = root_dir::claim(&node_root, dir, now);
            let claimed = cluster::claim(&found, dir, former.is_some(), now);
            // A directory that cannot be read says nothing.
            open_options.node_was_used = root_dir::has_pods(&node_root).unwrap_or(false);
            let opened = open_store::open(&open_options)?;
            record_machine(&open_options);
            Ok::<_, OpenError>((former, claimed, opened))
        }),
        || {
            let dir = config.state_dir.display();
            warn!(%dir, "still opening the store: its disk is slow or hangs, or it is being repaired");
        },
    )
    .await
    .map_err(|error| AgentError::Ended {
        part: format!("opening the store: {error}"),
    })??;
    let meta = loaded.state.meta().cloned().ok_or(AgentError::Ended {
        part: "opening the store: it has no meta record".to_owned(),
    })?;
    metrics
        .epoch
        .set(i64::try_from(meta.epoch.number).unwrap_or(i64::MAX));
    if let Err(error) = ballast::create(&config.state_dir, ballast::DEFAULT_BYTES) {
        warn!(%error, "cannot reserve disk space for stopping pods on a full disk");
    }
    let store_options = StoreOptions {
        reserve: Some(Box::new(Ballast::new(
            &config.state_dir,
            ballast::DEFAULT_BYTES,
        ))),
        ..StoreOptions::default()
    };
    let open_report = report;
    let store = Store::start(
        backend,
        loaded,
        store_options,
        Arc::clone(&clock),
        metrics.clone(),
    )?;
    let parts = Parts {
        store,
        meta,
        clock,
        metrics,
        boot,
        api,
        shutdown: None,
        cluster_doubted: claimed.doubted,
        figures: None,
        image_disk: None,
        machine: None,
        addresses: None,
    };
    let mut base = Base::new(config, parts);
    base.cluster = at_start;
    let former = match (former, claimed.former) {
        (Some(path), _) => Some(("the root directory was wiped or replaced", path)),
        (None, Some(path)) => Some(("the node has joined another cluster", path)),
        (None, None) => None,
    };
    tell_how_it_opened(&open_report, former, &*base.recorder);
    Ok(base)
}

/// Records what this machine and the node are called, for when the machine has another ID or the host no name. Blocking.
fn record_machine(options: &OpenOptions) {
    let identity = &options.identity;
    let node = Some(format!("{}\n", identity.node_name));
    let records = [
        (boot::NODE_NAME_RECORD, node),
        (
            boot::MACHINE_RECORD,
            boot::machine_record(&identity.machine_id, &options.dir),
        ),
    ];
    for (name, text) in records {
        let Some(text) = text else {
            continue;
        };
        let found = std::fs::read(options.dir.join(name));
        let is_recorded = found.is_ok_and(|found| found == text.as_bytes());
        if !is_recorded && let Err(error) = root_dir::write(&options.dir, name, &text) {
            warn!(%error, name, "cannot record the names of the machine and its node; if they change, the store counts as foreign");
        }
    }
}

/// `former`: the reason why the previous node's store was moved to quarantine, and its path.
fn tell_how_it_opened(
    report: &OpenReport,
    former: Option<(&str, PathBuf)>,
    recorder: &dyn EventRecorder,
) {
    if let Some((why, former)) = former {
        let message = format!(
            "{why}: beginning with an empty store; the previous one is {}",
            former.display()
        );
        recorder.record(Event::node(EventType::Normal, "StoreSetAside", message));
        return;
    }
    let (kind, reason) = match &report.outcome {
        OpenOutcome::Created if report.new_epoch == Some(EpochReason::Rebuilt) => {
            (EventType::Warning, "StoreRebuilt")
        }
        OpenOutcome::Opened | OpenOutcome::Created => {
            info!(outcome = ?report.outcome, "store opened");
            return;
        }
        OpenOutcome::SnapshotsRemoved => (EventType::Normal, "StoreRepaired"),
        OpenOutcome::Salvaged { .. }
        | OpenOutcome::RecordsLost { .. }
        | OpenOutcome::EndMissing { .. } => (EventType::Warning, "StoreSalvaged"),
        OpenOutcome::NewerSchema { .. } => (EventType::Warning, "StoreSchemaNewer"),
        OpenOutcome::Unwritable { .. } => (EventType::Warning, "StoreUnwritable"),
    };
    let message = format!("{:?}; {}", report.outcome, report.messages.join("; "));
    recorder.record(Event::node(kind, reason, message));
}

/// Returns the directory of automatic backups.
pub(super) fn backup_dir(config: &AgentConfig) -> PathBuf {
    config.state_dir.join("backups")
}
