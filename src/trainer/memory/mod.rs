//! Passes that are kept below a budget by what they are seen to take.
//!
//! How micro-batches go through the model is chosen by calculation ([`choose`](super::choose)). A
//! [`MemoryGuard`] watches what each of them takes. Where one is above the budget, or where a device has no
//! room for it, the step is broken off with nothing learned, its micro-batches are made smaller and all of
//! it is done again. So the numbers of a step are those of the size that it ended with, nothing is counted
//! twice, and a run that goes on with that size from that step on makes the same numbers.

use std::cell::Cell;
use std::fmt;

use bytesize::ByteSize;

use super::TrainerError;
use super::batch::MicroBatch;
use super::budget::{MicroBatches, WORTHWHILE_TOKENS};
use crate::collective::Collective;
use crate::engine::{PeakMemory, is_out_of_memory};

/// Tells what is held in memory while a pass is made.
pub trait MemoryMeter: fmt::Debug + Send + Sync {
    /// Begins a measurement, and returns what is held before it, in bytes; `None` where nobody tells.
    fn begin(&self) -> Option<u64>;

    /// Returns the most that was held since, in bytes.
    fn peak(&self) -> Option<u64>;

    /// Gives back what is kept for later and would be counted as held.
    fn release(&self);
}

impl MemoryMeter for PeakMemory {
    fn begin(&self) -> Option<u64> {
        Self::restart()
    }

    fn peak(&self) -> Option<u64> {
        Self::read()
    }

    fn release(&self) {
        Self::release();
    }
}

/// A pass that took more memory than it may.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Overshoot {
    /// Tokens that it ran the model over.
    pub tokens: usize,
    /// How many sequences they are of; one where the others add nothing to the longest.
    pub sequences: usize,
    /// What was measured of it; `None` for a device that had no room.
    pub measured: Option<MeasuredMemory>,
}

/// What was measured of a pass, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MeasuredMemory {
    /// Held before it.
    pub before: u64,
    /// Held at its peak.
    pub peak: u64,
    /// What it was to stay below.
    pub budget: u64,
}

impl fmt::Display for Overshoot {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let tokens = self.tokens;
        match self.measured {
            Some(MeasuredMemory {
                before,
                peak,
                budget,
            }) => write!(
                formatter,
                "a pass over {tokens} tokens came to {} of memory, of which {} were held before it; \
                 `trainer.memory_budget` is {}",
                ByteSize(peak),
                ByteSize(before),
                ByteSize(budget)
            ),
            None => write!(
                formatter,
                "the device had no room for a pass over {tokens} tokens"
            ),
        }
    }
}

/// What was done about a pass that took too much.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemoryChange {
    /// The pass.
    pub overshoot: Overshoot,
    /// How micro-batches go through the model from this step on; `None` where nothing is left to make
    /// smaller.
    pub after: Option<MicroBatches>,
}

impl fmt::Display for MemoryChange {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}; ", self.overshoot)?;
        match self.after {
            Some(MicroBatches {
                micro_batch_tokens,
                recompute,
            }) => write!(
                formatter,
                "the step is done again, and from it on passes have {micro_batch_tokens} tokens{}",
                if recompute {
                    " and run layers again"
                } else {
                    ""
                }
            ),
            None => write!(
                formatter,
                "nothing is left to make smaller, so the run goes on above it: raise it, or lower \
                 `rollout.max_total_tokens` or `rollout.max_cache_tokens`"
            ),
        }
    }
}

/// Says what passes may take, and sees what they do.
#[derive(Debug)]
pub struct MemoryGuard {
    /// In bytes; none for as much as there is.
    budget: Option<u64>,
    meter: Box<dyn MemoryMeter>,
}

impl MemoryGuard {
    /// Returns a guard that keeps passes below `budget` bytes, as `meter` tells of them.
    #[must_use]
    pub fn new(budget: u64, meter: Box<dyn MemoryMeter>) -> Self {
        Self {
            budget: Some(budget),
            meter,
        }
    }

    /// Returns a guard that measures nothing; that a device has no room is seen all the same.
    #[must_use]
    pub fn of_device() -> Self {
        Self {
            budget: None,
            meter: Box::new(PeakMemory),
        }
    }
}

/// A guard over the passes of one step.
#[derive(Debug)]
pub(super) struct Watch<'a> {
    /// None watches nothing.
    pub(super) guard: Option<&'a MemoryGuard>,
    /// Whether layers are run again already, as they always are on a GPU.
    pub(super) runs_again: bool,
    /// The most that was held in a pass.
    pub(super) peak: Cell<Option<u64>>,
    /// A pass that took too much and cannot be made smaller.
    pub(super) beyond_help: Cell<Option<Overshoot>>,
}

impl<'a> Watch<'a> {
    pub(super) fn new(guard: Option<&'a MemoryGuard>, runs_again: bool) -> Self {
        Self {
            guard,
            runs_again,
            peak: Cell::new(None),
            beyond_help: Cell::new(None),
        }
    }

    /// Makes a pass over a micro-batch.
    ///
    /// # Errors
    ///
    /// Fails as the pass does, and with [`TrainerError::Memory`] where it took too much.
    pub(super) fn pass<T>(
        &self,
        micro: &MicroBatch,
        pass: impl FnOnce() -> Result<T, TrainerError>,
    ) -> Result<T, TrainerError> {
        let Some(guard) = self.guard else {
            return pass();
        };
        let begun = guard
            .budget
            .and_then(|budget| Some((budget, guard.meter.begin()?)));
        let overshoot = |measured| Overshoot {
            tokens: micro.batch.tokens().len(),
            sequences: if micro.is_one_path() {
                1
            } else {
                micro.sequences.len()
            },
            measured,
        };
        let made = match pass() {
            Err(error) if is_out_of_memory(&error) => {
                let overshoot = overshoot(None);
                return Err(if overshoot.next(self.runs_again).is_some() {
                    TrainerError::Memory { overshoot }
                } else {
                    TrainerError::OutOfMemory {
                        tokens: overshoot.tokens,
                        source: Box::new(error),
                    }
                });
            }
            made => made?,
        };
        let Some(((budget, before), peak)) = begun.zip(guard.meter.peak()) else {
            return Ok(made);
        };
        self.peak.set(self.peak.get().max(Some(peak)));
        if peak <= budget {
            return Ok(made);
        }
        let overshoot = overshoot(Some(MeasuredMemory {
            before,
            peak,
            budget,
        }));
        // Smaller passes do not help where there is no room for any.
        if before < budget && overshoot.next(self.runs_again).is_some() {
            return Err(TrainerError::Memory { overshoot });
        }
        self.beyond_help.set(Some(overshoot));
        Ok(made)
    }

    /// Lets the processes that share a step know of each other's passes that took too much: then all of
    /// them do the step again.
    ///
    /// # Errors
    ///
    /// Fails on all with the first such pass, or as `own` did.
    pub(super) fn agree<T>(
        &self,
        ranks: &dyn Collective,
        own: Result<T, TrainerError>,
    ) -> Result<T, TrainerError> {
        if self.guard.is_none() || ranks.world_size() == 1 {
            return own;
        }
        let found = match &own {
            Err(TrainerError::Memory { overshoot }) => Some(*overshoot),
            Err(_) => return own,
            Ok(_) => None,
        };
        let numbers = found.map_or([0.0; Overshoot::NUMBERS], Overshoot::to_numbers);
        let all = ranks.all_gather_numbers("comparing memory", &numbers)?;
        let first = all.iter().find_map(|numbers| {
            let numbers = numbers.first_chunk()?;
            Overshoot::from_numbers(*numbers)
        });
        match first {
            Some(overshoot) => Err(TrainerError::Memory { overshoot }),
            None => own,
        }
    }
}

impl Overshoot {
    const NUMBERS: usize = 5;

    /// Returns how micro-batches are made smaller after this one: half of its tokens, and layers run again
    /// before passes get so small that it costs. `None` where it is one sequence whose layers are run
    /// again.
    pub(super) fn next(&self, runs_again: bool) -> Option<MicroBatches> {
        let half = self.tokens / 2;
        let can_halve = self.sequences > 1 && half > 0;
        if can_halve && (runs_again || half >= WORTHWHILE_TOKENS) {
            return Some(MicroBatches {
                micro_batch_tokens: half,
                recompute: runs_again,
            });
        }
        (!runs_again).then_some(MicroBatches {
            micro_batch_tokens: self.tokens,
            recompute: true,
        })
    }

    fn to_numbers(self) -> [f64; Self::NUMBERS] {
        let measured = self.measured.map_or([0; 3], |measured| {
            [measured.before, measured.peak, measured.budget]
        });
        let [before, peak, budget] = measured.map(|bytes| bytes as f64);
        [
            self.tokens as f64,
            self.sequences as f64,
            before,
            peak,
            budget,
        ]
    }

    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "they were counts"
    )]
    fn from_numbers(
        [tokens, sequences, before, peak, budget]: [f64; Self::NUMBERS],
    ) -> Option<Self> {
        // Without a sequence there is no pass.
        (sequences > 0.0).then(|| Self {
            tokens: tokens as usize,
            sequences: sequences as usize,
            measured: (peak > 0.0).then_some(MeasuredMemory {
                before: before as u64,
                peak: peak as u64,
                budget: budget as u64,
            }),
        })
    }
}

/// What a trainer did about the memory of its passes.
#[derive(Debug, Default)]
pub(super) struct MemoryLog {
    changes: Vec<MemoryChange>,
    /// What cannot be helped is said once.
    is_told: bool,
    /// The most that was held in a pass of the last step.
    pub(super) peak: Option<u64>,
}

impl MemoryLog {
    /// Does a step with micro-batches as `chosen` says, made smaller as often as it takes; `attempt` leaves
    /// everything as it was where it fails.
    ///
    /// # Errors
    ///
    /// Fails as `attempt` does with anything but passes that took too much.
    pub(super) fn keep_within<T>(
        &mut self,
        guard: Option<&MemoryGuard>,
        chosen: &mut MicroBatches,
        is_gpu: bool,
        mut attempt: impl FnMut(MicroBatches, &Watch<'_>) -> Result<T, TrainerError>,
    ) -> Result<T, TrainerError> {
        self.peak = None;
        loop {
            let watch = Watch::new(guard, chosen.recompute || is_gpu);
            match attempt(*chosen, &watch) {
                Err(TrainerError::Memory { overshoot }) => {
                    self.shrink(&watch, chosen, overshoot)?;
                }
                result => {
                    self.settle(&watch);
                    return result;
                }
            }
        }
    }

    /// Makes micro-batches smaller after a pass that took too much.
    ///
    /// # Errors
    ///
    /// Fails where that cannot be, which a watch does not ask for.
    pub(super) fn shrink(
        &mut self,
        watch: &Watch<'_>,
        chosen: &mut MicroBatches,
        overshoot: Overshoot,
    ) -> Result<(), TrainerError> {
        let Some(next) = overshoot.next(watch.runs_again) else {
            return Err(TrainerError::Memory { overshoot });
        };
        // The pass may have been smaller than they could be, and smaller than what was left of them.
        *chosen = MicroBatches {
            micro_batch_tokens: next.micro_batch_tokens.min(chosen.micro_batch_tokens),
            ..next
        };
        self.changes.push(MemoryChange {
            overshoot,
            after: Some(*chosen),
        });
        if let Some(guard) = watch.guard {
            guard.meter.release();
        }
        Ok(())
    }

    /// Takes over what was seen of passes that are done.
    pub(super) fn settle(&mut self, watch: &Watch<'_>) {
        self.peak = self.peak.max(watch.peak.get());
        // Sampling, which nobody watches, is not to have what passes took beside what it takes.
        if let Some(guard) = watch.guard
            && guard.budget.is_some()
        {
            guard.meter.release();
        }
        if let Some(overshoot) = watch.beyond_help.get()
            && !std::mem::replace(&mut self.is_told, true)
        {
            self.changes.push(MemoryChange {
                overshoot,
                after: None,
            });
        }
    }

    /// Returns what was done since the last call.
    pub(super) fn take(&mut self) -> Vec<MemoryChange> {
        std::mem::take(&mut self.changes)
    }
}

#[cfg(test)]
pub(super) mod tests;
