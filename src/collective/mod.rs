//! Several processes that work as one: what they tell each other, and sums over what they hold.
//!
//! Each process has a rank, from 0, the root, on. A [`Collective`] is what they do together, in
//! lockstep: every rank calls the same operations in the same order, and each returns on all ranks or
//! fails on all. [`Solo`] is the world of one process. [`TcpCollective`] connects several, named by the
//! environment ([`Launch`]), through the root: for a few processes, and for whatever is small. With the
//! feature `nccl` a `NcclCollective` sums tensors on GPUs and leaves the rest to it.
//!
//! # The order of sums
//!
//! Sums of floats depend on their order. [`OrderedSum`] adds the parts of a sum in the order of one
//! fixed binary tree over them, whoever holds which parts, so a sum over host memory has the same bits
//! for any number of processes. On GPUs NCCL chooses the order: there it is the same on all ranks, and
//! the same from run to run with as many of them.
//!
//! # Failure
//!
//! A rank that ends, breaks off or says nothing for a minute is lost; ranks that do different things
//! find out by the name and number of what they do. Either way every rank gets one error that names the
//! culprit. Nothing is mended here: a run goes on from its last checkpoint.

mod error;
mod handshake;
mod join;
mod launch;
#[cfg(feature = "nccl")]
mod nccl;
mod sum;
mod tcp;
mod wire;

#[cfg(test)]
mod tests;
#[cfg(test)]
pub(crate) mod tests_support;

use std::fmt;

pub use error::CollectiveError;
pub use launch::{Launch, Token};
#[cfg(feature = "nccl")]
pub use nccl::NcclCollective;
pub use sum::{Numbers, OrderedSum};
pub use tcp::{TcpCollective, Timeouts};

/// What several processes do together. Each operation names itself, for ranks that lost step.
pub trait Collective: fmt::Debug {
    /// Returns which of the processes this one is, from 0.
    fn rank(&self) -> usize;

    /// Returns how many processes there are.
    fn world_size(&self) -> usize;

    /// Returns what each rank gave, in their order.
    ///
    /// # Errors
    ///
    /// Fails where a rank is lost or out of step.
    fn all_gather(
        &self,
        activity: &'static str,
        bytes: Vec<u8>,
    ) -> Result<Vec<Vec<u8>>, CollectiveError>;

    /// Returns the whole of a sum of which each rank has added its share of the parts.
    ///
    /// # Errors
    ///
    /// Fails where a rank is lost or out of step, or where parts are missing.
    fn sum(&self, activity: &'static str, sum: OrderedSum) -> Result<Numbers, CollectiveError>;

    /// Returns what sums tensors where they lie, if they lie on a device that has such a thing.
    fn on_device(&self) -> Option<&dyn DeviceSum> {
        None
    }

    /// Tells the other ranks that this one cannot go on.
    fn abort(&self, reason: &str) {
        let _ = reason;
    }

    /// Returns whether this rank writes what the processes make together.
    fn is_root(&self) -> bool {
        self.rank() == 0
    }

    /// Waits until every rank is here.
    ///
    /// # Errors
    ///
    /// Fails where a rank is lost or out of step.
    fn barrier(&self, activity: &'static str) -> Result<(), CollectiveError> {
        self.all_gather(activity, Vec::new()).map(drop)
    }

    /// Returns the numbers that each rank gave, to the bit.
    ///
    /// # Errors
    ///
    /// Fails where a rank is lost or out of step.
    fn all_gather_numbers(
        &self,
        activity: &'static str,
        numbers: &[f64],
    ) -> Result<Vec<Vec<f64>>, CollectiveError> {
        let bytes = numbers
            .iter()
            .flat_map(|number| number.to_le_bytes())
            .collect();
        let gathered = self.all_gather(activity, bytes)?;
        let numbers = gathered.iter().enumerate().map(|(rank, bytes)| {
            let (numbers, rest) = bytes.as_chunks::<8>();
            if rest.is_empty() {
                Ok(numbers.iter().copied().map(f64::from_le_bytes).collect())
            } else {
                Err(CollectiveError::Malformed {
                    rank,
                    what: "numbers",
                })
            }
        });
        numbers.collect()
    }

    /// Returns whether a claim holds on any rank.
    ///
    /// # Errors
    ///
    /// Fails where a rank is lost or out of step.
    fn any(&self, activity: &'static str, claim: bool) -> Result<bool, CollectiveError> {
        let gathered = self.all_gather(activity, vec![u8::from(claim)])?;
        Ok(gathered.iter().any(|bytes| bytes.first() == Some(&1)))
    }

    /// Returns the part of `count` things in a row that is this rank's.
    fn share(&self, count: usize) -> std::ops::Range<usize> {
        let end = |rank: usize| rank * count / self.world_size();
        end(self.rank())..end(self.rank() + 1)
    }
}

/// Sums over the ranks on the devices that their tensors lie on.
pub trait DeviceSum: fmt::Debug {
    /// Sums a contiguous tensor in `f32` over all ranks, in place.
    ///
    /// # Errors
    ///
    /// Fails where a rank is lost or the device fails.
    fn sum(&self, tensor: &candle_core::Tensor) -> Result<(), CollectiveError>;
}

/// One process by itself.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Solo;

impl Collective for Solo {
    fn rank(&self) -> usize {
        0
    }

    fn world_size(&self) -> usize {
        1
    }

    fn all_gather(
        &self,
        _activity: &'static str,
        bytes: Vec<u8>,
    ) -> Result<Vec<Vec<u8>>, CollectiveError> {
        Ok(vec![bytes])
    }

    fn sum(&self, _activity: &'static str, sum: OrderedSum) -> Result<Numbers, CollectiveError> {
        sum.finish()
    }
}
