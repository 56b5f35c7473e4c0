//! A backend without a disk: a map. Clones share the map, so that a test can "restart" on the same data.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::{Backend, BackendError, Op, RawIter};

type Map = BTreeMap<Vec<u8>, Vec<u8>>;

/// A map that plays disk.
#[derive(Clone, Debug, Default)]
pub struct MemoryBackend {
    map: Arc<Mutex<Map>>,
}

impl MemoryBackend {
    /// An empty one.
    pub fn new() -> Self {
        Self::default()
    }

    fn map(&self) -> MutexGuard<'_, Map> {
        // A batch is applied without a call that can panic in between, so a poisoned map is whole.
        self.map.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Backend for MemoryBackend {
    fn apply(&mut self, batch: &[Op]) -> Result<(), BackendError> {
        let mut map = self.map();
        for op in batch {
            match op {
                Op::Put { key, value } => {
                    map.insert(key.clone(), value.clone());
                }
                Op::Delete { key } => {
                    map.remove(key);
                }
            }
        }
        Ok(())
    }

    fn flush(&mut self) -> Result<(), BackendError> {
        Ok(())
    }

    fn sync(&mut self) -> Result<(), BackendError> {
        Ok(())
    }

    fn iter(&self) -> RawIter<'_> {
        let pairs: Vec<_> = self
            .map()
            .iter()
            .map(|(k, v)| Ok((k.clone(), v.clone())))
            .collect();
        Box::new(pairs.into_iter())
    }

    fn size_on_disk(&self) -> Result<u64, BackendError> {
        let bytes: usize = self.map().iter().map(|(k, v)| k.len() + v.len()).sum();
        Ok(bytes as u64)
    }

    fn reopen(&mut self) -> Result<(), BackendError> {
        Ok(())
    }

    fn name(&self) -> &'static str {
        "memory"
    }
}
