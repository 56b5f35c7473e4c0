//! Keeps table `objects` in step with what is known.
//!
//! In: keys of records that may differ. Out: commits. One task writes all of them but certificates, so that no two writers of one
//! record overtake each other; what a record should be is looked up when it is written.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::MissedTickBehavior;
use tokio_util::sync::CancellationToken;

use super::cache::{Known, ObjectCell, Watched, lock, service_record_key};
use super::context::{Context, TABLE};
use super::refs::ObjectKey;
use super::vault::{self, OpenError};
use super::{Cells, Inner, Watch, pod_certificates, service_accounts, trust};
use crate::core::state::{ObjectRecord, Transaction};
use crate::store::CommitError;
use crate::types::{Event, EventType};

/// Most records of one commit, and their bytes, roughly.
const BATCH: usize = 64;
const BATCH_BYTES: usize = 4 << 20;
/// Poll interval of the key file.
const TICK: Duration = Duration::from_secs(10);
/// Pause after a commit that failed.
const PAUSE: Duration = Duration::from_secs(1);

/// Required state of a key's record.
enum Wanted {
    /// As it is.
    Kept,
    Put(ObjectRecord),
    Gone,
}

/// Runs until `token` is cancelled; then writes what is left.
pub(super) async fn run(inner: &Inner, token: &CancellationToken) {
    let ctx = &inner.ctx;
    let mut tick = tokio::time::interval(TICK);
    tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut unreadable = 0;
    let mut first = true;
    loop {
        tokio::select! {
            () = token.cancelled() => break,
            // Cancel-safe: a permit that was taken leads to a look at every mark.
            () = ctx.wake.notified() => {}
            // Cancel-safe by its documentation.
            _ = tick.tick() => {}
        }
        let reloaded = ctx.vault.reload();
        if reloaded || first {
            reencrypt(ctx).await;
        }
        if !flush(inner).await {
            tokio::select! {
                () = token.cancelled() => break,
                () = tokio::time::sleep(PAUSE) => {}
            }
            ctx.wake.notify_one();
        }
        if reloaded || first || unreadable > 0 {
            unreadable = tell_unreadable(ctx, unreadable);
        }
        first = false;
    }
    flush(inner).await;
}

/// Writes what was marked. False when the store refuses; what is left stays marked.
async fn flush(inner: &Inner) -> bool {
    let ctx = &inner.ctx;
    let mut marked = ctx.take_marked();
    while !marked.is_empty() {
        let mut transaction = Transaction::new();
        let mut batch = Vec::new();
        let mut bytes = 0;
        while bytes < BATCH_BYTES
            && batch.len() < BATCH
            && let Some(key) = marked.pop_first()
        {
            match wanted(inner, &key) {
                Wanted::Kept => continue,
                Wanted::Gone if ctx.store.snapshot().record::<ObjectRecord>(&key).is_none() => {
                    continue;
                }
                Wanted::Gone => transaction = transaction.delete::<ObjectRecord>(&key),
                Wanted::Put(record) => {
                    bytes += record.data.len();
                    transaction = transaction.put(&key, record);
                }
            }
            batch.push(key);
        }
        if transaction.is_empty() {
            continue;
        }
        match ctx.store.commit(transaction).await {
            Ok(_) => {}
            // Never for what is built here, and no better the next time.
            Err(error @ (CommitError::Invalid { .. } | CommitError::Stale { .. })) => {
                tracing::error!(%error, keys = ?batch, "cannot record objects");
            }
            Err(CommitError::Closed) => return true,
            Err(error @ (CommitError::Unavailable { .. } | CommitError::Unknown { .. })) => {
                // The store itself logs its troubles.
                tracing::debug!(%error, "recording objects later");
                ctx.mark_all(batch.into_iter().chain(marked));
                return false;
            }
        }
    }
    true
}

fn wanted(inner: &Inner, key: &str) -> Wanted {
    let ctx = &inner.ctx;
    if let Some(object) = ObjectKey::from_record_key(key) {
        let watch = lock(&inner.tables).watches.get(&object).map(Watch::cells);
        return match watch {
            None => Wanted::Gone,
            Some(Cells::ConfigMap(cell)) => wanted_object(ctx, key, &cell),
            Some(Cells::Secret(cell)) => wanted_object(ctx, key, &cell),
            Some(Cells::RuntimeClass(cell)) => wanted_object(ctx, key, &cell),
            Some(Cells::Claim(cell)) => wanted_object(ctx, key, &cell),
            Some(Cells::PersistentVolume(cell)) => wanted_object(ctx, key, &cell),
            Some(Cells::VolumeAttachment(cell)) => wanted_object(ctx, key, &cell),
            Some(Cells::CsiDriver(cell)) => wanted_object(ctx, key, &cell),
        };
    }
    if key.starts_with("services/") {
        let services = lock(&inner.tables)
            .services
            .as_ref()
            .map(|s| s.cell.known());
        let Some(Known::Live(services)) = services else {
            return Wanted::Kept;
        };
        let mut parts = key.splitn(3, '/').skip(1).map(str::to_owned);
        let (Some(namespace), Some(name)) = (parts.next(), parts.next()) else {
            return Wanted::Gone;
        };
        let place = (namespace, name);
        debug_assert_eq!(service_record_key(&place), key);
        let Some(service) = services.get(&place) else {
            return Wanted::Gone;
        };
        let version = service.metadata.resource_version.as_deref();
        return put(ctx.record_of(key, version.unwrap_or_default(), &**service, false));
    }
    if let Some(name) = key.strip_prefix(trust::RECORDS) {
        let known = lock(&inner.tables).trust.as_ref().map(|t| t.cell.known());
        return match known {
            None => Wanted::Gone,
            Some(Known::Nothing | Known::Recorded(_)) => Wanted::Kept,
            Some(Known::Live(all)) => match all.get(name) {
                None => Wanted::Gone,
                Some(bundle) => put(ctx.record_of(key, "", bundle, false)),
            },
        };
    }
    if key.starts_with(service_accounts::RECORDS) {
        let tables = lock(&inner.tables);
        return match tables.accounts.get(key) {
            Some(facts) => put(ctx.record_of(key, "", facts, false)),
            None if tables.uses_account(key) => Wanted::Kept,
            None => Wanted::Gone,
        };
    }
    if pod_certificates::is_record(key) {
        // Their tasks write them.
        return match lock(&inner.tables).certificates.contains_key(key) {
            true => Wanted::Kept,
            false => Wanted::Gone,
        };
    }
    let token = lock(&inner.tables).tokens.get(key).map(Arc::clone);
    match token.map(|entry| entry.held()) {
        None => Wanted::Gone,
        Some(None) => Wanted::Kept,
        Some(Some(held)) => put(ctx.record_of(key, "", &held, true)),
    }
}

fn wanted_object<K: Watched>(ctx: &Context, key: &str, cell: &ObjectCell<K>) -> Wanted {
    match cell.known() {
        Known::Nothing | Known::Recorded(_) => Wanted::Kept,
        Known::Live(None) => Wanted::Gone,
        Known::Live(Some(object)) => {
            let version = object.meta().resource_version.as_deref();
            put(ctx.record_of(
                key,
                version.unwrap_or_default(),
                &*object,
                K::KIND.is_secret(),
            ))
        }
    }
}

fn put(record: Option<ObjectRecord>) -> Wanted {
    record.map_or(Wanted::Kept, Wanted::Put)
}

/// Encrypts every record with the active key that another key of the ring encrypted.
async fn reencrypt(ctx: &Context) {
    let Some(active) = ctx.vault.active() else {
        return;
    };
    let state = ctx.store.snapshot();
    let mut count = 0;
    for (key, versioned) in &state.objects {
        let record = &versioned.record;
        if !record.encrypted || vault::key_of(&record.data).is_none_or(|id| id == active) {
            continue;
        }
        let Ok(plain) = ctx.vault.unseal(TABLE, key, &record.data) else {
            continue;
        };
        let Ok(data) = ctx.vault.seal(TABLE, key, &plain) else {
            continue;
        };
        let sealed = ObjectRecord {
            data,
            ..record.clone()
        };
        let transaction = Transaction::new()
            .expect::<ObjectRecord>(&state, key)
            .put(key, sealed);
        match ctx.store.commit(transaction).await {
            Ok(_) => count += 1,
            // A newer one was written meanwhile, with the active key.
            Err(CommitError::Stale { .. }) => {}
            Err(error) => {
                tracing::warn!(%error, "recorded secrets are still encrypted with an older key");
                return;
            }
        }
    }
    if count > 0 {
        tracing::info!(records = count, key = %active, "encrypted recorded secrets with the active key");
    }
}

/// Counts the records that cannot be decrypted, and logs when there are more than `before`.
fn tell_unreadable(ctx: &Context, before: usize) -> usize {
    let state = ctx.store.snapshot();
    let mut keys = BTreeSet::new();
    let mut count = 0;
    for (key, versioned) in &state.objects {
        let record = &versioned.record;
        if !record.encrypted {
            continue;
        }
        if let Err(error) = ctx.vault.unseal(TABLE, key, &record.data) {
            count += 1;
            if let OpenError::UnknownKey { id, .. } = error {
                keys.insert(id);
            }
        }
    }
    ctx.metrics
        .secrets_unreadable
        .set(i64::try_from(count).unwrap_or(i64::MAX));
    if count > before {
        let why = ctx.vault.trouble().unwrap_or_else(|| match keys.len() {
            0 => "they are damaged".to_owned(),
            _ => {
                let keys: Vec<_> = keys.iter().map(ToString::to_string).collect();
                let (keys, place) = (keys.join(", "), ctx.vault.place());
                format!("they need the keys {keys}, which {place}")
            }
        });
        let message = format!(
            "{count} recorded secrets and tokens cannot be decrypted and are fetched again from the API server; pods \
             that need them wait for it: {why}"
        );
        tracing::warn!(
            records = count,
            why,
            "cannot decrypt recorded secrets, fetching them again"
        );
        if let Some(events) = &ctx.events {
            events.record(Event::node(
                EventType::Warning,
                "SecretsKeyMissing",
                message,
            ));
        }
    }
    count
}
