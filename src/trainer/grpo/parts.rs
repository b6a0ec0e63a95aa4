//! The parts that a step is learned from in, each by itself, and the processes that share them.
//!
//! Every process knows all episodes of a step and divides them into the same parts, whole groups that
//! are about equally long. It runs the model on its share of the parts; what comes of a part depends on
//! nothing but the part, and is put together in the parts' order. So the numbers of a step depend on how
//! many parts there are, by rounding, and not on how many processes.

use std::ops::Range;

use super::super::TrainerError;
use super::super::batch::{MicroBatch, TrainSequence, pack};
use super::super::loss::{LossConfig, LossMetrics};
use super::super::memory::Watch;
use super::super::value::{ValueHead, ValueSums};
use crate::collective::{Collective, Numbers, OrderedSum};
use crate::engine::model::{Decoder, FlatGradient, Gradients};

/// Divides sequences, given with their groups, into `parts` stretches of whole groups in a row with about
/// as many tokens each; stretches may be empty.
pub(super) fn divide(
    sequences: &[TrainSequence],
    groups: &[usize],
    parts: usize,
) -> Vec<Range<usize>> {
    let costs: Vec<usize> = sequences
        .iter()
        .map(|sequence| sequence.tokens.len())
        .collect();
    let total = costs.iter().sum::<usize>().max(1);
    let mut part_of = Vec::with_capacity(sequences.len());
    let (mut start, mut before) = (0, 0);
    for run in groups.chunk_by(|a, b| a == b) {
        let cost: usize = costs[start..start + run.len()].iter().sum();
        // A group goes where its middle lies.
        let part = (before + cost / 2) * parts / total;
        part_of.extend(std::iter::repeat_n(part.min(parts - 1), run.len()));
        (start, before) = (start + run.len(), before + cost);
    }
    let end = |part: usize| part_of.partition_point(|found| *found < part);
    (0..parts).map(|part| end(part)..end(part + 1)).collect()
}

/// The means to put a step's parts together.
#[derive(Debug, Clone, Copy)]
pub(super) struct Parts<'a> {
    pub(super) ranks: &'a dyn Collective,
    /// How many there are.
    pub(super) count: usize,
    /// Sees what their passes take.
    pub(super) watch: &'a Watch<'a>,
}

impl Parts<'_> {
    /// Returns this process's share of them.
    pub(super) fn own(&self) -> Range<usize> {
        self.ranks.share(self.count)
    }

    /// Returns for each sequence the numbers of its targets, which `score` finds for those of a
    /// micro-batch; none for a sequence without.
    pub(super) fn score(
        &self,
        activity: &'static str,
        (sequences, groups): (&[TrainSequence], &[usize]),
        (token_budget, loss): (usize, &LossConfig),
        score: impl Fn(&MicroBatch) -> Result<Vec<f64>, TrainerError>,
    ) -> Result<Vec<Vec<f64>>, TrainerError> {
        let stretches = divide(sequences, groups, self.count);
        let own_scores = || {
            let mut own = Vec::new();
            for part in self.own() {
                let sequences = &sequences[stretches[part].clone()];
                let mut found = vec![Vec::new(); sequences.len()];
                for micro in pack(sequences, token_budget, loss, loss.totals([]))? {
                    let numbers = self.watch.pass(&micro, || score(&micro))?;
                    for (targets, &index) in micro.ranges().zip(&micro.sequences) {
                        found[index] = numbers[targets].to_vec();
                    }
                }
                own.extend(found.into_iter().flatten());
            }
            Ok(own)
        };
        let own = self.watch.agree(self.ranks, own_scores())?;
        let all = self.ranks.all_gather_numbers(activity, &own)?.concat();
        let mut rest = all.as_slice();
        let mut numbers = Vec::with_capacity(sequences.len());
        for sequence in sequences {
            let count = sequence.trainable_tokens();
            let Some((own, behind)) = rest.split_at_checked(count) else {
                let (found, expected) = (rest.len(), count);
                return Err(TrainerError::Length {
                    what: "gathered numbers against targets",
                    found,
                    expected,
                });
            };
            numbers.push(own.to_vec());
            rest = behind;
        }
        Ok(numbers)
    }

    /// Returns the gradient of all parts and what is to be reported of them, given what adds one part's
    /// micro-batch. What a value head learns goes into it.
    pub(super) fn gradient(
        &self,
        decoder: &Decoder,
        micro_batches: &[Vec<MicroBatch>],
        mut critic: Option<&mut ValueHead>,
        mut add: impl FnMut(
            &MicroBatch,
            &mut Gradients,
            Option<&mut ValueHead>,
        ) -> Result<LossMetrics, TrainerError>,
    ) -> Result<(Gradients, LossMetrics), TrainerError> {
        // On a device, or alone with one part, the sum is the device's or the process's own.
        let device = (self.ranks.on_device()).filter(|_| !decoder.is_fused());
        let is_ordered = device.is_none() && self.count > 1;
        let mut gradients = decoder.zero_gradients();
        let mut sum = OrderedSum::new(self.count);
        let mut reports = Vec::new();
        let mut own_gradient = || {
            for (part, micro_batches) in self.own().zip(micro_batches) {
                let mut metrics = LossMetrics::default();
                for micro in micro_batches {
                    let add = || add(micro, &mut gradients, critic.as_deref_mut());
                    metrics.merge(&self.watch.pass(micro, add)?);
                }
                reports.extend(metrics.to_numbers());
                if let Some(critic) = critic.as_deref_mut() {
                    let (gradient, sums) = critic.take_part();
                    reports.extend([sums.loss, sums.tokens as f64, sums.clipped as f64]);
                    reports.extend(gradient);
                }
                if is_ordered {
                    let part_gradient = std::mem::replace(&mut gradients, decoder.zero_gradients());
                    sum.push(part, numbers(part_gradient.into_flat()?))?;
                }
            }
            Ok(())
        };
        let own = own_gradient();
        self.watch.agree(self.ranks, own)?;
        if let Some(device) = device {
            gradients.for_each_tensor(|tensor| Ok::<_, TrainerError>(device.sum(tensor)?))?;
        } else if is_ordered {
            let whole = self.ranks.sum("summing gradients", sum)?;
            gradients.set_flat(&flat(whole))?;
        }
        let metrics = self.reports(&reports, critic)?;
        Ok((gradients, metrics))
    }

    /// Puts together what is reported of the parts, given this process's.
    fn reports(
        &self,
        own: &[f64],
        mut critic: Option<&mut ValueHead>,
    ) -> Result<LossMetrics, TrainerError> {
        let all = self.ranks.all_gather_numbers("gathering metrics", own)?;
        let all = all.concat();
        let of_head = (critic.as_ref()).map_or(0, |critic| 3 + critic.gradient().len());
        let width = LossMetrics::NUMBERS + of_head;
        if all.len() != width * self.count {
            return Err(TrainerError::Length {
                what: "gathered metrics",
                found: all.len(),
                expected: width * self.count,
            });
        }
        let mut metrics = LossMetrics::default();
        for report in all.chunks_exact(width) {
            let Some((numbers, head)) = report.split_first_chunk() else {
                break;
            };
            metrics.merge(&LossMetrics::from_numbers(*numbers));
            if let (Some(critic), Some(([loss, tokens, clipped], gradient))) =
                (critic.as_deref_mut(), head.split_first_chunk())
            {
                #[expect(
                    clippy::cast_possible_truncation,
                    clippy::cast_sign_loss,
                    reason = "they were counts"
                )]
                let sums = ValueSums {
                    loss: *loss,
                    tokens: *tokens as usize,
                    clipped: *clipped as usize,
                };
                critic.add_part(gradient, sums);
            }
        }
        Ok(metrics)
    }
}

fn numbers(flat: FlatGradient) -> Numbers {
    match flat {
        FlatGradient::F32(numbers) => Numbers::F32(numbers),
        FlatGradient::F64(numbers) => Numbers::F64(numbers),
    }
}

fn flat(numbers: Numbers) -> FlatGradient {
    match numbers {
        Numbers::F32(numbers) => FlatGradient::F32(numbers),
        Numbers::F64(numbers) => FlatGradient::F64(numbers),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_whole_groups_of_about_as_many_tokens() {
        let sequences = |lengths: &[usize]| -> Vec<TrainSequence> {
            let sequence = |&length| TrainSequence {
                tokens: vec![1; length],
                ..TrainSequence::default()
            };
            lengths.iter().map(sequence).collect()
        };
        let even = sequences(&[10; 8]);
        let groups = [0, 0, 1, 1, 2, 2, 3, 3];
        assert_eq!(divide(&even, &groups, 1)[0], 0..8);
        assert_eq!(divide(&even, &groups, 2), [0..4, 4..8]);
        assert_eq!(divide(&even, &groups, 4), [0..2, 2..4, 4..6, 6..8]);
        // A long group is as good as several short ones.
        let uneven = sequences(&[45, 45, 10, 10, 10, 10, 10, 10]);
        assert_eq!(divide(&uneven, &groups, 2), [0..2, 2..8]);
        // More parts than groups leave some empty, and cover everything once.
        let many = divide(&even, &groups, 7);
        assert_eq!(many.len(), 7);
        assert_eq!((many[0].start, many[6].end), (0, 8));
        assert!(many.windows(2).all(|pair| pair[0].end == pair[1].start));
        assert!(many.iter().all(|range| range.len().is_multiple_of(2)));
        assert_eq!(divide(&[], &[], 3), [0..0, 0..0, 0..0]);
    }

    #[test]
    fn metrics_go_through_numbers_unchanged() {
        let empty = LossMetrics::default();
        assert_eq!(LossMetrics::from_numbers(empty.to_numbers()), empty);
    }
}
