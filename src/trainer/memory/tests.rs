//! When passes are made smaller, and how far.

use std::collections::VecDeque;
use std::sync::Mutex;

use super::*;
use crate::engine::model::PackedBatch;
use crate::trainer::{LossConfig, TrainSequence, pack};

const BUDGET: u64 = 1000;

/// Tells given peaks, one for each pass, and then small ones.
#[derive(Debug, Default)]
pub(in crate::trainer) struct Scripted {
    peaks: Mutex<VecDeque<u64>>,
    before: u64,
}

impl Scripted {
    /// Returns a guard whose passes with these numbers, from 0, are above its budget.
    pub(in crate::trainer) fn above_at(passes: &[usize]) -> MemoryGuard {
        let last = passes.iter().copied().max().map_or(0, |last| last + 1);
        let peak = |pass: usize| BUDGET + u64::from(passes.contains(&pass));
        let meter = Self {
            peaks: Mutex::new((0..last).map(peak).collect()),
            before: 10,
        };
        MemoryGuard::new(BUDGET, Box::new(meter))
    }
}

impl MemoryMeter for Scripted {
    fn begin(&self) -> Option<u64> {
        Some(self.before)
    }

    fn peak(&self) -> Option<u64> {
        Some(self.peaks.lock().unwrap().pop_front().unwrap_or(BUDGET))
    }

    fn release(&self) {}
}

/// A device that has room for passes of so many tokens.
#[derive(Debug)]
struct Device {
    room: usize,
}

impl Device {
    fn run(&self, batch: &PackedBatch) -> Result<usize, TrainerError> {
        let tokens = batch.tokens().len();
        if tokens <= self.room {
            return Ok(tokens);
        }
        let text = "DriverError(CUDA_ERROR_OUT_OF_MEMORY, \"out of memory\")";
        Err(candle_core::Error::Cuda(text.into()).into())
    }
}

/// Sequences that run the model over `tokens` tokens each.
fn sequences(lengths: &[usize]) -> Vec<TrainSequence> {
    let sequence = |(index, &tokens): (usize, &usize)| TrainSequence {
        // Alike in nothing, or they would share what is alike.
        tokens: vec![u32::try_from(index).unwrap(); tokens + 1],
        loss_mask: (0..=tokens).map(|token| token == tokens).collect(),
        ..TrainSequence::default()
    };
    lengths.iter().enumerate().map(sequence).collect()
}

/// Runs all passes of a step, and returns how many tokens each has.
fn step(
    log: &mut MemoryLog,
    guard: &MemoryGuard,
    chosen: &mut MicroBatches,
    is_gpu: bool,
    lengths: &[usize],
    run: impl Fn(&PackedBatch) -> Result<usize, TrainerError>,
) -> Result<Vec<usize>, TrainerError> {
    log.keep_within(Some(guard), chosen, is_gpu, |chosen, watch| {
        let loss = LossConfig::default();
        let totals = loss.totals([1]);
        let micro_batches = pack(
            &sequences(lengths),
            chosen.micro_batch_tokens,
            &loss,
            totals,
        )?;
        (micro_batches.iter())
            .map(|micro| watch.pass(micro, || run(&micro.batch)))
            .collect()
    })
}

fn chosen(micro_batch_tokens: usize, recompute: bool) -> MicroBatches {
    MicroBatches {
        micro_batch_tokens,
        recompute,
    }
}

#[test]
fn a_device_without_room_has_smaller_passes_until_they_fit() {
    let device = Device { room: 700 };
    let guard = MemoryGuard::of_device();
    let mut log = MemoryLog::default();
    let mut now = chosen(16_384, true);
    let run = |batch: &PackedBatch| device.run(batch);
    let passes = step(&mut log, &guard, &mut now, true, &[300; 6], run).unwrap();
    // 1800 tokens are halved to 900, those 900 to 450, in which one sequence fits.
    assert_eq!((passes, now), (vec![300; 6], chosen(450, true)));
    let changes = log.take();
    let after: Vec<_> = changes.iter().map(|change| change.after).collect();
    assert_eq!(after, [Some(chosen(900, true)), Some(chosen(450, true))]);
    assert_eq!(
        changes[0].to_string(),
        "the device had no room for a pass over 1800 tokens; the step is done again, and from it on \
         passes have 900 tokens and run layers again"
    );
    // It is not forgotten, and said once.
    step(&mut log, &guard, &mut now, true, &[300; 6], run).unwrap();
    assert!(log.take().is_empty());
    // One sequence that is too long is the end, with what the device said.
    let error = step(&mut log, &guard, &mut now, true, &[300, 701], run).unwrap_err();
    let message = error.to_string();
    assert!(
        message.contains("no room for a pass over 701 tokens"),
        "{message}"
    );
    assert!(is_out_of_memory(&error), "what the device said is kept");
    // Other errors are nobody's memory.
    let error = step(&mut log, &guard, &mut now, true, &[300], |_| {
        Err(TrainerError::FirstTokenInLoss { sequence: 0 })
    });
    assert!(matches!(error, Err(TrainerError::FirstTokenInLoss { .. })));
    assert!(log.take().is_empty());
}

#[test]
fn layers_run_again_before_passes_get_so_small_that_it_costs() {
    let overshoot = |tokens, sequences| Overshoot {
        tokens,
        sequences,
        measured: None,
    };
    for (tokens, sequences, runs_again, expected) in [
        (4096, 4, false, Some(chosen(2048, false))),
        (512, 4, false, Some(chosen(256, false))),
        (500, 4, false, Some(chosen(500, true))),
        (500, 4, true, Some(chosen(250, true))),
        (4096, 1, false, Some(chosen(4096, true))),
        (4096, 1, true, None),
    ] {
        assert_eq!(overshoot(tokens, sequences).next(runs_again), expected);
    }
}

#[test]
fn what_smaller_passes_cannot_help_is_said_once_and_goes_on() {
    let run = |batch: &PackedBatch| Ok(batch.tokens().len());
    let mut log = MemoryLog::default();
    // One long sequence, with layers run again.
    let guard = Scripted::above_at(&[0, 1, 2]);
    let mut now = chosen(64, true);
    let passes = step(&mut log, &guard, &mut now, false, &[100, 101], run).unwrap();
    assert_eq!((passes, now), (vec![100, 101], chosen(64, true)));
    step(&mut log, &guard, &mut now, false, &[100], run).unwrap();
    let [change] = log.take().try_into().unwrap();
    let message = change.to_string();
    assert!(
        message.contains("101 tokens came to 1001 B of memory, of which 10 B were held before it")
            && message.contains("`trainer.memory_budget` is 1000 B; nothing is left"),
        "{message}"
    );
    assert_eq!(log.peak, Some(1001));
    // What is held besides passes is above the budget already.
    let meter = Scripted {
        peaks: Mutex::new([1500].into()),
        before: 1200,
    };
    let guard = MemoryGuard::new(BUDGET, Box::new(meter));
    let (mut log, mut now) = (MemoryLog::default(), chosen(4096, false));
    let passes = step(&mut log, &guard, &mut now, false, &[100; 8], run).unwrap();
    assert_eq!((passes, now), (vec![800], chosen(4096, false)));
    assert_eq!(log.take().len(), 1);
}

#[test]
fn sequences_that_run_over_the_same_tokens_are_as_one() {
    let sequence = |length: usize, target: u32| {
        let mut tokens = vec![7; length];
        tokens.push(target);
        TrainSequence {
            loss_mask: (0..=length).map(|token| token == length).collect(),
            tokens,
            ..TrainSequence::default()
        }
    };
    // Two that differ in what they say at last, and one that is their beginning.
    let sequences = [sequence(60, 1), sequence(100, 1), sequence(100, 2)];
    let loss = LossConfig::default();
    let guard = Scripted::above_at(&[0]);
    let (mut log, mut now) = (MemoryLog::default(), chosen(16_384, true));
    let mut attempts = 0;
    let attempt = |chosen: MicroBatches, watch: &Watch<'_>| {
        attempts += 1;
        assert!(attempts < 10, "nothing got smaller");
        let micro_batches = pack(
            &sequences,
            chosen.micro_batch_tokens,
            &loss,
            loss.totals([1]),
        );
        let pass = |micro: &MicroBatch| {
            watch.pass(micro, || {
                Ok((micro.sequences.len(), micro.batch.tokens().len()))
            })
        };
        micro_batches?
            .iter()
            .map(pass)
            .collect::<Result<Vec<_>, _>>()
    };
    let passes = log.keep_within(Some(&guard), &mut now, false, attempt);
    assert_eq!(passes.unwrap(), [(3, 100)]);
    assert_eq!((attempts, now), (1, chosen(16_384, true)));
    assert_eq!(log.take().len(), 1, "it is said");
}

#[test]
fn overshoots_go_through_numbers_unchanged() {
    let measured = MeasuredMemory {
        before: 1,
        peak: 1 << 50,
        budget: 3,
    };
    for measured in [None, Some(measured)] {
        let overshoot = Overshoot {
            tokens: 4096,
            sequences: 7,
            measured,
        };
        assert_eq!(
            Overshoot::from_numbers(overshoot.to_numbers()),
            Some(overshoot)
        );
    }
    assert_eq!(Overshoot::from_numbers([0.0; Overshoot::NUMBERS]), None);
}
