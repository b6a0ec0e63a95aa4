//! Adapters beside one base: several at once, chosen by each segment of a batch.
//!
//! The base's product is computed for all rows together, and each run of rows with the same adapter
//! gets that adapter's update. So rows without one have the base's bits, whatever stands beside them.

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::ops::Range;
use std::sync::{Arc, PoisonError, RwLock};

use super::dropout::RowDropout;
use super::linear::{Linear, Lora};
use super::{Adapters, ModelError, PackedBatch};

#[cfg(test)]
mod tests;

/// Names one adapter of a decoder; numbers are never used again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct AdapterId(u64);

impl AdapterId {
    /// Returns the number, which no other adapter of its decoder has had or will have.
    pub(crate) fn number(self) -> u64 {
        self.0
    }
}

impl fmt::Display for AdapterId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// A hold on an adapter, which cannot be removed while there is one.
#[derive(Debug, Clone)]
pub struct AdapterLease(Arc<ServedAdapter>);

impl AdapterLease {
    /// Returns the adapter's number.
    pub fn id(&self) -> AdapterId {
        self.0.id
    }

    /// Returns the adapter's name.
    pub fn name(&self) -> &str {
        &self.0.name
    }
}

/// An adapter's updates.
#[derive(Debug)]
struct ServedAdapter {
    id: AdapterId,
    name: String,
    /// By the name of the weight that they belong to.
    updates: HashMap<String, Lora>,
}

/// The adapters of a decoder.
#[derive(Debug, Default)]
pub(super) struct AdapterRegistry {
    inner: RwLock<Inner>,
}

#[derive(Debug, Default)]
struct Inner {
    next_id: u64,
    adapters: BTreeMap<AdapterId, Arc<ServedAdapter>>,
}

impl AdapterRegistry {
    /// Adds an adapter, given its updates by the names of their weights.
    pub(super) fn add(
        &self,
        name: &str,
        updates: HashMap<String, Lora>,
    ) -> Result<AdapterId, ModelError> {
        let mut inner = self.inner.write().unwrap_or_else(PoisonError::into_inner);
        if inner.adapters.values().any(|adapter| adapter.name == name) {
            let name = name.to_owned();
            return Err(ModelError::AdapterNameTaken { name });
        }
        let id = AdapterId(inner.next_id);
        inner.next_id += 1;
        let adapter = ServedAdapter {
            id,
            name: name.to_owned(),
            updates,
        };
        inner.adapters.insert(id, Arc::new(adapter));
        Ok(id)
    }

    pub(super) fn remove(&self, id: AdapterId) -> Result<(), ModelError> {
        let mut inner = self.inner.write().unwrap_or_else(PoisonError::into_inner);
        let Some(adapter) = inner.adapters.get(&id) else {
            return Err(ModelError::UnknownAdapter { id });
        };
        // New holds are taken under the lock or from one that is counted.
        if Arc::strong_count(adapter) > 1 {
            let name = adapter.name.clone();
            return Err(ModelError::AdapterInUse { name });
        }
        inner.adapters.remove(&id);
        Ok(())
    }

    pub(super) fn lease(&self, id: AdapterId) -> Result<AdapterLease, ModelError> {
        let inner = self.inner.read().unwrap_or_else(PoisonError::into_inner);
        let adapter = inner.adapters.get(&id);
        let adapter = adapter.ok_or(ModelError::UnknownAdapter { id })?;
        Ok(AdapterLease(Arc::clone(adapter)))
    }

    pub(super) fn list(&self) -> Vec<(AdapterId, String)> {
        let inner = self.inner.read().unwrap_or_else(PoisonError::into_inner);
        let adapters = inner.adapters.values();
        adapters
            .map(|adapter| (adapter.id, adapter.name.clone()))
            .collect()
    }

    /// Returns which adapter each row of a batch asks for.
    pub(super) fn rows(
        &self,
        batch: &PackedBatch,
        own: Adapters,
    ) -> Result<RowAdapters, ModelError> {
        let mut runs: Vec<(Range<usize>, AdapterLease)> = Vec::new();
        for (segment, adapter) in batch.segments().iter().zip(batch.adapters()) {
            let (Some(id), Adapters::On, false) = (adapter, own, segment.is_empty()) else {
                continue;
            };
            match runs.last_mut() {
                Some((rows, last)) if rows.end == segment.start && last.id() == *id => {
                    rows.end = segment.end;
                }
                _ => runs.push((segment.clone(), self.lease(*id)?)),
            }
        }
        let dropout = None;
        Ok(RowAdapters { own, dropout, runs })
    }
}

/// The adapters of one pass.
#[derive(Debug)]
pub(super) struct RowAdapters {
    /// Whether the model's own adapter is on, the one that is trained.
    pub(super) own: Adapters,
    /// What is dropped before it.
    pub(super) dropout: Option<RowDropout>,
    /// Rows with an adapter from beside the base, in order. A model with an adapter of its own has
    /// none.
    runs: Vec<(Range<usize>, AdapterLease)>,
}

impl RowAdapters {
    /// Returns the adapters of some of the rows, counted from the first of them.
    pub(super) fn part(&self, part: Range<usize>) -> Self {
        let runs = self.runs.iter().filter_map(|(rows, adapter)| {
            let (start, end) = (rows.start.max(part.start), rows.end.min(part.end));
            (start < end).then(|| (start - part.start..end - part.start, adapter.clone()))
        });
        Self {
            own: self.own,
            dropout: (self.dropout.as_ref()).map(|dropout| dropout.part(part.clone())),
            runs: runs.collect(),
        }
    }

    /// Returns the base alone.
    pub(super) fn none() -> Self {
        Self {
            own: Adapters::Off,
            dropout: None,
            runs: Vec::new(),
        }
    }

    /// Returns the updates of a linear layer's output, each with its rows, in order.
    pub(super) fn updates<'a>(
        &'a self,
        linear: &'a Linear,
    ) -> impl Iterator<Item = (Range<usize>, &'a Lora)> {
        self.runs.iter().filter_map(|(rows, adapter)| {
            let update = adapter.0.updates.get(linear.weight.name())?;
            Some((rows.clone(), update))
        })
    }
}
