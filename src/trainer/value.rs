//! The value head of PPO: what an episode will still earn, as a linear function of the hidden state that
//! the next token is predicted from.

use std::path::Path;

use candle_core::{DType, Device, Tensor};

use super::TrainerError;
use super::batch::MicroBatch;
use super::optim::{AdamWConfig, VectorAdamW};
use crate::engine::model::{ModelError, read_safetensors, write_safetensors};

const FILE: &str = "value_head.safetensors";

/// Hidden states that are read at a time, so that no copy of all of them is made in `f64`.
pub(super) const ROWS_AT_A_TIME: usize = 64;

/// How a value head is trained.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ValueConfig {
    /// The head's own step size.
    pub learning_rate: f64,
    /// How far a value may move from that before the step before its loss stops falling; infinite for
    /// no bound.
    pub clip: f64,
    /// What the loss is multiplied by on its way into the model below; 0 leaves that to the policy.
    pub trunk_coef: f64,
}

/// The loss of one value and its derivative: half the larger of the squared errors of the value and of
/// the value as it may move (PPO2's clipped value loss, as verl has it), and whether the bound holds.
pub fn value_loss(value: f64, old: f64, target: f64, clip: f64) -> (f64, f64, bool) {
    let bounded = value.clamp(old - clip, old + clip);
    let (free, bound) = (value - target, bounded - target);
    if bound * bound > free * free {
        // The bounded value is a constant.
        (0.5 * bound * bound, 0.0, true)
    } else {
        (0.5 * free * free, free, false)
    }
}

/// Sums over the values of a step, merged over micro-batches.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct ValueSums {
    /// The loss: weighed, so a plain sum.
    pub loss: f64,
    /// Values.
    pub tokens: usize,
    /// Values whose bound held.
    pub clipped: usize,
}

/// A linear function of the hidden state, in `f64`, and its optimizer.
#[derive(Debug, Clone)]
pub struct ValueHead {
    config: ValueConfig,
    /// The weights, then the bias.
    parameters: Vec<f64>,
    gradient: Vec<f64>,
    optimizer: VectorAdamW,
    sums: ValueSums,
}

impl ValueHead {
    /// Returns a head for hidden states of `width` that says 0 everywhere.
    pub fn new(width: usize, config: ValueConfig, optimizer: AdamWConfig) -> Self {
        // Decay would pull values to 0, not to what is earned.
        let optimizer = AdamWConfig {
            weight_decay: 0.0,
            ..optimizer
        };
        Self {
            config,
            parameters: vec![0.0; width + 1],
            gradient: vec![0.0; width + 1],
            optimizer: VectorAdamW::new(width + 1, optimizer),
            sums: ValueSums::default(),
        }
    }

    /// Returns the weights, the bias last.
    pub fn parameters(&self) -> &[f64] {
        &self.parameters
    }

    /// Returns the weights, the bias last, to be set.
    pub fn parameters_mut(&mut self) -> &mut [f64] {
        &mut self.parameters
    }

    /// Returns the gradient since the last step, the bias last.
    pub fn gradient(&self) -> &[f64] {
        &self.gradient
    }

    /// Returns the value at each target of a micro-batch, from its hidden states `[n, hidden]`.
    ///
    /// # Errors
    ///
    /// Fails if the tensor library does.
    pub fn values(&self, hidden: &Tensor, micro: &MicroBatch) -> Result<Vec<f64>, TrainerError> {
        let mut values = Vec::with_capacity(micro.targets.len());
        for positions in positions(micro).chunks(ROWS_AT_A_TIME) {
            let rows = rows_of(hidden, positions)?;
            values.extend(rows.chunks_exact(self.width()).map(|row| self.value(row)));
        }
        Ok(values)
    }

    fn width(&self) -> usize {
        self.parameters.len() - 1
    }

    fn value(&self, row: &[f64]) -> f64 {
        let (bias, weights) = self.parameters.split_last().expect("there is a bias");
        row.iter().zip(weights).map(|(x, w)| x * w).sum::<f64>() + bias
    }

    /// Adds the gradient of the value loss of a micro-batch, each target weighed by `weight`, to the
    /// head's, and what of it goes on into the model to `dhidden` `[n, hidden]`, in place.
    ///
    /// # Errors
    ///
    /// Fails if the micro-batch lacks returns or old values, or if the tensor library does.
    pub fn accumulate(
        &mut self,
        hidden: &Tensor,
        micro: &MicroBatch,
        weight: f64,
        dhidden: &Tensor,
    ) -> Result<(), TrainerError> {
        let expected = micro.targets.len();
        for (what, found) in [
            ("returns against targets", micro.returns.len()),
            ("old values against targets", micro.values.len()),
        ] {
            if found != expected {
                return Err(TrainerError::Length {
                    what,
                    found,
                    expected,
                });
            }
        }
        let width = self.width();
        let mut old_and_goal = micro.values.iter().zip(&micro.returns);
        for positions in positions(micro).chunks(ROWS_AT_A_TIME) {
            let rows = rows_of(hidden, positions)?;
            let mut below = Vec::new();
            for (row, (&old, &goal)) in rows.chunks_exact(width).zip(&mut old_and_goal) {
                let (loss, slope, is_clipped) =
                    value_loss(self.value(row), old, goal, self.config.clip);
                let slope = slope * weight;
                self.sums.loss += loss * weight;
                self.sums.tokens += 1;
                self.sums.clipped += usize::from(is_clipped);
                for (sum, x) in self.gradient.iter_mut().zip(row.iter().chain(&[1.0])) {
                    *sum += slope * x;
                }
                if self.config.trunk_coef != 0.0 {
                    let slope = slope * self.config.trunk_coef;
                    below.extend(self.parameters[..width].iter().map(|w| slope * w));
                }
            }
            if !below.is_empty() {
                add_rows(dhidden, positions, below)?;
            }
        }
        Ok(())
    }

    /// Takes out the gradient and the sums since the last step, which start at 0 again.
    pub(super) fn take_part(&mut self) -> (Vec<f64>, ValueSums) {
        let zeros = vec![0.0; self.gradient.len()];
        let gradient = std::mem::replace(&mut self.gradient, zeros);
        (gradient, std::mem::take(&mut self.sums))
    }

    /// Adds a gradient and sums that were taken out, of this head or of another process's.
    pub(super) fn add_part(&mut self, gradient: &[f64], sums: ValueSums) {
        for (sum, part) in self.gradient.iter_mut().zip(gradient) {
            *sum += part;
        }
        self.sums.loss += sums.loss;
        self.sums.tokens += sums.tokens;
        self.sums.clipped += sums.clipped;
    }

    /// Returns the norm of the gradient since the last step.
    pub(super) fn grad_norm(&self) -> f64 {
        self.gradient.iter().map(|g| g * g).sum::<f64>().sqrt()
    }

    /// Updates the head from its gradient, which starts at 0 again, at `scale` times its step size.
    /// Returns the gradient's norm and the sums since the last step.
    ///
    /// # Errors
    ///
    /// Fails if the gradient is not finite; the head is then as before.
    pub fn step(&mut self, scale: f64) -> Result<(f64, ValueSums), TrainerError> {
        let rate = self.config.learning_rate * scale;
        let norm = self
            .optimizer
            .step(&mut self.parameters, &self.gradient, rate)?;
        self.gradient.fill(0.0);
        Ok((norm, std::mem::take(&mut self.sums)))
    }

    /// Forgets the gradient since the last step.
    pub fn clear(&mut self) {
        self.gradient.fill(0.0);
        self.sums = ValueSums::default();
    }

    /// Writes the head and its moments into a checkpoint's folder.
    ///
    /// # Errors
    ///
    /// Fails if the file cannot be written.
    pub fn save(&self, folder: &Path) -> Result<(), TrainerError> {
        let (first, second, steps) = self.optimizer.state();
        let tensor = |values: &[f64]| Tensor::new(values, &Device::Cpu);
        let tensors = [
            ("parameters".to_owned(), tensor(&self.parameters)?),
            ("first".to_owned(), tensor(first)?),
            ("second".to_owned(), tensor(second)?),
            ("steps".to_owned(), tensor(&[steps as f64])?),
        ];
        Ok(write_safetensors(&folder.join(FILE), &tensors)?)
    }

    /// Sets the head and its moments to what [`ValueHead::save`] wrote.
    ///
    /// # Errors
    ///
    /// Fails if the file is missing, damaged or of another model.
    pub fn load(&mut self, folder: &Path) -> Result<(), TrainerError> {
        let tensors = read_safetensors(&folder.join(FILE), DType::F64, &Device::Cpu)?;
        let find = |name: &str, expected: usize| -> Result<Vec<f64>, TrainerError> {
            let found = tensors.iter().find(|(found, _)| found == name);
            let (_, tensor) = found.ok_or_else(|| ModelError::MissingTensor {
                name: name.to_owned(),
            })?;
            let values = tensor.flatten_all()?.to_vec1::<f64>()?;
            if values.len() != expected {
                return Err(TrainerError::Length {
                    what: "numbers of the value head",
                    found: values.len(),
                    expected,
                });
            }
            Ok(values)
        };
        let count = self.parameters.len();
        self.parameters = find("parameters", count)?;
        let steps = find("steps", 1)?[0];
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "it was a count"
        )]
        let steps = steps as usize;
        self.optimizer
            .restore(find("first", count)?, find("second", count)?, steps);
        Ok(())
    }
}

fn positions(micro: &MicroBatch) -> Vec<u32> {
    let narrow =
        |&position: &usize| u32::try_from(position).expect("a batch has fewer than 2^32 tokens");
    micro.targets.positions.iter().map(narrow).collect()
}

/// Returns rows of `hidden` `[n, hidden]`, one after the other.
fn rows_of(hidden: &Tensor, positions: &[u32]) -> Result<Vec<f64>, TrainerError> {
    let positions = Tensor::new(positions, hidden.device())?;
    let rows = hidden.detach().index_select(&positions, 0)?;
    let rows = rows.to_device(&Device::Cpu)?.to_dtype(DType::F64)?;
    Ok(rows.flatten_all()?.to_vec1()?)
}

/// Adds `rows`, one after the other, to those of `target` `[n, hidden]`, in place.
fn add_rows(target: &Tensor, positions: &[u32], rows: Vec<f64>) -> Result<(), TrainerError> {
    let shape = (positions.len(), rows.len() / positions.len());
    let rows = Tensor::from_vec(rows, shape, &Device::Cpu)?
        .to_dtype(target.dtype())?
        .to_device(target.device())?;
    let positions = Tensor::new(positions, target.device())?
        .unsqueeze(1)?
        .broadcast_as(shape)?
        .contiguous()?;
    Ok(target.scatter_add_set(&positions, &rows, 0)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::model::tests_support::golden;
    use crate::trainer::Targets;

    #[test]
    fn rows_are_read_some_at_a_time_and_none_is_missed() {
        const WIDTH: usize = 3;
        let targets = 2 * ROWS_AT_A_TIME + 5;
        // Two answers may go on from one token, and not every token is a target.
        let positions: Vec<usize> = (0..targets).map(|target| target / 2 * 3).collect();
        let tokens = positions[targets - 1] + 1;
        let state = |row: usize, i: usize| ((row * WIDTH + i) as f64).sin();
        let states = |row: usize| [0, 1, 2].map(|i| state(row, i));
        let all: Vec<f64> = (0..tokens).flat_map(states).collect();
        let hidden = Tensor::from_vec(all, (tokens, WIDTH), &Device::Cpu).unwrap();
        let goal = |target: usize| (target as f64).cos();
        let micro = MicroBatch {
            targets: Targets {
                tokens: vec![0; targets],
                positions: positions.clone(),
            },
            values: vec![0.0; targets],
            returns: (0..targets).map(goal).collect(),
            ..MicroBatch::default()
        };
        let config = ValueConfig {
            learning_rate: 0.1,
            clip: f64::INFINITY,
            trunk_coef: 0.5,
        };
        let mut head = ValueHead::new(WIDTH, config, AdamWConfig::default());
        let parameters = [0.3, -0.7, 0.2, 0.1];
        head.parameters_mut().copy_from_slice(&parameters);
        let value = |row: usize| {
            let terms = states(row).into_iter().zip(parameters);
            terms.map(|(x, w)| x * w).sum::<f64>() + parameters[WIDTH]
        };
        let values = head.values(&hidden, &micro).unwrap();
        let expected: Vec<f64> = positions.iter().map(|&row| value(row)).collect();
        assert_eq!(values, expected);

        let dhidden = hidden.ones_like().unwrap();
        head.accumulate(&hidden, &micro, 2.0, &dhidden).unwrap();
        let slope = |target: usize| 2.0 * (value(positions[target]) - goal(target));
        for i in 0..=WIDTH {
            let input = |row: usize| if i == WIDTH { 1.0 } else { state(row, i) };
            let terms = (0..targets).map(|target| slope(target) * input(positions[target]));
            assert!((terms.sum::<f64>() - head.gradient()[i]).abs() < 1e-12);
        }
        let found = dhidden.to_vec2::<f64>().unwrap();
        for (row, found) in found.iter().enumerate() {
            let here = (0..targets).filter(|&target| positions[target] == row);
            let slope: f64 = here.map(slope).sum();
            for (found, w) in found.iter().zip(parameters) {
                assert!((found - 1.0 - 0.5 * slope * w).abs() < 1e-12, "{row}");
            }
        }
        let short = MicroBatch {
            values: Vec::new(),
            ..micro
        };
        assert!(head.accumulate(&hidden, &short, 1.0, &dhidden).is_err());
    }

    #[test]
    fn the_clipped_value_loss_is_that_of_verl() {
        let case = golden("value_loss_clipped");
        let (values, old) = (
            case.floats("inputs", "vpred"),
            case.floats("inputs", "vold"),
        );
        let (returns, clip) = (
            case.floats("inputs", "returns"),
            case.float("inputs", "cliprange"),
        );
        let loss = |by: f64, token: usize| {
            value_loss(values[token] + by, old[token], returns[token], clip)
        };
        let mean = (0..3).map(|token| loss(0.0, token).0).sum::<f64>() / 3.0;
        assert!((mean - case.float("expected", "loss")).abs() < 1e-12);
        let unclipped = (0..3).map(|token| 0.5 * (values[token] - returns[token]).powi(2));
        assert!((unclipped.sum::<f64>() / 3.0 - mean).abs() > 1e-3);
        // The second stands on its bound, where the loss has a kink.
        for token in [0, 2] {
            let slope = (loss(1e-6, token).0 - loss(-1e-6, token).0) / 2e-6;
            assert!((slope - loss(0.0, token).1).abs() < 1e-9, "{token}");
        }
        assert_eq!(
            [0, 1, 2].map(|token| loss(0.0, token).2),
            [true, false, false]
        );
    }
}
