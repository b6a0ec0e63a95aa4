//! The value head of PPO: what an episode will still earn, as a linear function of the hidden state that
//! the next token is predicted from.

use std::path::Path;

use candle_core::{DType, Device, Tensor};

use super::TrainerError;
use super::batch::MicroBatch;
use super::optim::{AdamWConfig, VectorAdamW};
use crate::engine::model::{ModelError, read_safetensors, write_safetensors};

const FILE: &str = "value_head.safetensors";

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
        let rows = target_rows(hidden, micro)?;
        Ok(rows.iter().map(|row| self.value(row)).collect())
    }

    fn value(&self, row: &[f64]) -> f64 {
        let (bias, weights) = self.parameters.split_last().expect("there is a bias");
        row.iter().zip(weights).map(|(x, w)| x * w).sum::<f64>() + bias
    }

    /// Adds the gradient of the value loss of a micro-batch, each target weighed by `weight`, to the
    /// head's, and returns `dhidden` `[n, hidden]` with what of it goes on into the model.
    ///
    /// # Errors
    ///
    /// Fails if the micro-batch has no returns, or if the tensor library does.
    pub fn accumulate(
        &mut self,
        hidden: &Tensor,
        micro: &MicroBatch,
        weight: f64,
        dhidden: Tensor,
    ) -> Result<Tensor, TrainerError> {
        if micro.returns.len() != micro.targets.len() {
            return Err(TrainerError::Length {
                what: "returns against targets",
                found: micro.returns.len(),
                expected: micro.targets.len(),
            });
        }
        let rows = target_rows(hidden, micro)?;
        let mut slopes = Vec::with_capacity(rows.len());
        for (target, row) in rows.iter().enumerate() {
            let (old, goal) = (micro.values[target], micro.returns[target]);
            let (loss, slope, is_clipped) =
                value_loss(self.value(row), old, goal, self.config.clip);
            let slope = slope * weight;
            self.sums.loss += loss * weight;
            self.sums.tokens += 1;
            self.sums.clipped += usize::from(is_clipped);
            for (sum, x) in self.gradient.iter_mut().zip(row.iter().chain(&[1.0])) {
                *sum += slope * x;
            }
            slopes.push(slope * self.config.trunk_coef);
        }
        if self.config.trunk_coef == 0.0 {
            return Ok(dhidden);
        }
        let width = self.parameters.len() - 1;
        let below: Vec<f64> = (slopes.iter())
            .flat_map(|slope| self.parameters[..width].iter().map(move |w| slope * w))
            .collect();
        let below = Tensor::from_vec(below, (rows.len(), width), &Device::Cpu)?
            .to_dtype(dhidden.dtype())?
            .to_device(dhidden.device())?;
        Ok(dhidden.index_add(&positions(micro, hidden.device())?, &below, 0)?)
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

fn positions(micro: &MicroBatch, device: &Device) -> Result<Tensor, TrainerError> {
    let narrow =
        |&position: &usize| u32::try_from(position).expect("a batch has fewer than 2^32 tokens");
    let positions: Vec<u32> = micro.targets.positions.iter().map(narrow).collect();
    Ok(Tensor::new(positions, device)?)
}

fn target_rows(hidden: &Tensor, micro: &MicroBatch) -> Result<Vec<Vec<f64>>, TrainerError> {
    let rows = hidden
        .detach()
        .index_select(&positions(micro, hidden.device())?, 0)?;
    Ok(rows
        .to_device(&Device::Cpu)?
        .to_dtype(DType::F64)?
        .to_vec2()?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::model::tests_support::golden;

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
