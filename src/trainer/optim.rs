//! AdamW with decoupled weight decay (Loshchilov and Hutter 2019), clipping and schedules.

use std::collections::HashMap;
use std::sync::Mutex;

use candle_core::{CpuStorage, DType, InplaceOp1, Layout, Tensor, Var};
use rayon::prelude::*;
use serde::{Deserialize, Serialize};

use super::TrainerError;
use crate::engine::model::ops::Real;
use crate::engine::model::{Decoder, Gradients};

/// Elements that one rayon task updates.
const TASK_ELEMENTS: usize = 1 << 14;

/// Settings of [`AdamW`]. Defaults are those of TRL's trainers.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct AdamWConfig {
    /// Decay of the first moment; 0.9 by default.
    pub beta1: f64,
    /// Decay of the second moment; 0.999 by default.
    pub beta2: f64,
    /// Added to the root of the second moment; 1e-8 by default.
    pub eps: f64,
    /// Decoupled weight decay of every variable; 0 by default.
    pub weight_decay: f64,
    /// Gradients longer than this are scaled down to it; 1 by default.
    pub max_grad_norm: Option<f64>,
}

impl Default for AdamWConfig {
    fn default() -> Self {
        Self {
            beta1: 0.9,
            beta2: 0.999,
            eps: 1e-8,
            weight_decay: 0.0,
            max_grad_norm: Some(1.0),
        }
    }
}

impl AdamWConfig {
    /// Returns the factor that brings a gradient of this norm inside the limit, as torch's
    /// `clip_grad_norm_` computes it, its 1e-6 included.
    fn clip_factor(&self, grad_norm: f64) -> f64 {
        self.max_grad_norm
            .map_or(1.0, |limit| (limit / (grad_norm + 1e-6)).min(1.0))
    }
}

/// How the learning rate moves behind its warmup.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ScheduleKind {
    /// It stays.
    #[default]
    Constant,
    /// It falls along half a cosine to zero.
    Cosine,
    /// It falls along a line to zero.
    Linear,
}

/// Learning rate by step.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LrSchedule {
    /// The highest rate.
    pub learning_rate: f64,
    /// Steps of linear warmup; the first step has rate `learning_rate / warmup_steps`.
    pub warmup_steps: usize,
    /// Steps of the whole run.
    pub total_steps: usize,
    /// What follows the warmup.
    pub kind: ScheduleKind,
}

impl LrSchedule {
    /// Returns the rate of step `step`, counted from 0.
    pub fn rate(&self, step: usize) -> f64 {
        if step < self.warmup_steps {
            return self.learning_rate * (step + 1) as f64 / self.warmup_steps as f64;
        }
        let span = self.total_steps.saturating_sub(self.warmup_steps).max(1);
        let done = ((step - self.warmup_steps) as f64 / span as f64).min(1.0);
        let factor = match self.kind {
            ScheduleKind::Constant => 1.0,
            ScheduleKind::Cosine => 0.5 * (1.0 + (std::f64::consts::PI * done).cos()),
            ScheduleKind::Linear => 1.0 - done,
        };
        self.learning_rate * factor
    }
}

/// What one update did.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct UpdateStatistics {
    /// Norm of the gradient before clipping.
    pub grad_norm: f64,
    /// Factor that clipping applied; 1 without.
    pub clip_factor: f64,
}

/// First and second moments of one variable.
#[derive(Debug, Clone)]
enum Moments {
    /// On the CPU, in the variable's own type.
    F32(Vec<f32>, Vec<f32>),
    F64(Vec<f64>, Vec<f64>),
    /// Elsewhere.
    Tensors(Tensor, Tensor),
}

/// The optimizer: one pair of moments for each variable of a decoder.
#[derive(Debug, Clone)]
pub struct AdamW {
    config: AdamWConfig,
    names: Vec<String>,
    moments: Vec<Moments>,
    steps: usize,
}

impl AdamW {
    /// Makes an optimizer with zero moments for the decoder's variables.
    ///
    /// # Errors
    ///
    /// Fails if a setting is out of bounds, or if the tensor library fails.
    pub fn new(decoder: &Decoder, config: AdamWConfig) -> Result<Self, TrainerError> {
        let invalid = |field, value: f64| {
            Err(TrainerError::InvalidConfig {
                field,
                reason: format!("{value} is out of bounds"),
            })
        };
        for (field, beta) in [("beta1", config.beta1), ("beta2", config.beta2)] {
            if !(0.0..1.0).contains(&beta) {
                return invalid(field, beta);
            }
        }
        if !(config.eps > 0.0 && config.eps.is_finite()) {
            return invalid("eps", config.eps);
        }
        if !(config.weight_decay >= 0.0 && config.weight_decay.is_finite()) {
            return invalid("weight_decay", config.weight_decay);
        }
        if let Some(norm) = config
            .max_grad_norm
            .filter(|norm| norm.is_nan() || *norm <= 0.0)
        {
            return invalid("max_grad_norm", norm);
        }
        let moments = decoder
            .variables()
            .iter()
            .map(|(_, var)| {
                let len = var.elem_count();
                Ok(match (decoder.is_fused(), var.dtype()) {
                    (true, DType::F64) => Moments::F64(vec![0.0; len], vec![0.0; len]),
                    (true, _) => Moments::F32(vec![0.0; len], vec![0.0; len]),
                    (false, _) => Moments::Tensors(var.zeros_like()?, var.zeros_like()?),
                })
            })
            .collect::<candle_core::Result<_>>()?;
        let names = decoder
            .variables()
            .iter()
            .map(|(name, _)| name.clone())
            .collect();
        Ok(Self {
            config,
            names,
            moments,
            steps: 0,
        })
    }

    /// Returns the number of updates so far.
    pub fn steps(&self) -> usize {
        self.steps
    }

    /// Updates the decoder's variables in place, and its version with them.
    ///
    /// # Errors
    ///
    /// Fails if the gradient is not finite: the weights are then as before. Fails if the gradients
    /// belong to another model.
    pub fn step(
        &mut self,
        decoder: &Decoder,
        gradients: &Gradients,
        learning_rate: f64,
    ) -> Result<UpdateStatistics, TrainerError> {
        let variables = decoder.variables();
        if variables.len() != self.moments.len() || gradients.len() != self.moments.len() {
            return Err(TrainerError::Length {
                what: "gradients against moments",
                found: gradients.len(),
                expected: self.moments.len(),
            });
        }
        let grad_norm = gradients.norm()?;
        if !grad_norm.is_finite() {
            return Err(TrainerError::GradientNotFinite { norm: grad_norm });
        }
        let clip_factor = self.config.clip_factor(grad_norm);
        self.steps += 1;
        let update = Update::new(&self.config, learning_rate, clip_factor, self.steps);
        for (index, ((_, var), moments)) in variables.iter().zip(&mut self.moments).enumerate() {
            match moments {
                Moments::F32(first, second) => match gradients.values_f32(index) {
                    Some(gradient) => update.in_place(var, gradient, first, second)?,
                    None => {
                        return Err(TrainerError::Length {
                            what: "gradients in f32",
                            found: 0,
                            expected: variables.len(),
                        });
                    }
                },
                Moments::F64(first, second) => {
                    let gradient = gradients.tensor(index)?.flatten_all()?.to_vec1::<f64>()?;
                    update.in_place(var, &gradient, first, second)?;
                }
                Moments::Tensors(first, second) => {
                    update.composed(var, &gradients.tensor(index)?, first, second)?;
                }
            }
        }
        decoder.mark_updated();
        Ok(UpdateStatistics {
            grad_norm,
            clip_factor,
        })
    }

    /// Returns the moments by name: `first.NAME` and `second.NAME`.
    ///
    /// # Errors
    ///
    /// Fails if the tensor library does.
    pub fn state(&self) -> Result<Vec<(String, Tensor)>, TrainerError> {
        let mut state = Vec::with_capacity(2 * self.names.len());
        for (name, moments) in self.names.iter().zip(&self.moments) {
            let (first, second) = match moments {
                Moments::F32(first, second) => (flat(first.clone())?, flat(second.clone())?),
                Moments::F64(first, second) => (flat(first.clone())?, flat(second.clone())?),
                Moments::Tensors(first, second) => (first.flatten_all()?, second.flatten_all()?),
            };
            state.push((format!("first.{name}"), first));
            state.push((format!("second.{name}"), second));
        }
        Ok(state)
    }

    /// Sets moments and step count to what [`AdamW::state`] and [`AdamW::steps`] returned.
    ///
    /// # Errors
    ///
    /// Fails if a moment is missing or of another size; the optimizer may then be half restored.
    pub fn restore(
        &mut self,
        state: &HashMap<String, Tensor>,
        steps: usize,
    ) -> Result<(), TrainerError> {
        for (name, moments) in self.names.iter().zip(&mut self.moments) {
            let find = |kind: &str, expected: usize| {
                let key = format!("{kind}.{name}");
                let Some(tensor) = state.get(&key) else {
                    let missing = crate::engine::model::ModelError::MissingTensor { name: key };
                    return Err(TrainerError::from(missing));
                };
                if tensor.elem_count() != expected {
                    let (what, found) = ("elements of a moment", tensor.elem_count());
                    return Err(TrainerError::Length {
                        what,
                        found,
                        expected,
                    });
                }
                Ok(tensor)
            };
            match moments {
                Moments::F32(first, second) => {
                    *first = find("first", first.len())?.flatten_all()?.to_vec1()?;
                    *second = find("second", second.len())?.flatten_all()?.to_vec1()?;
                }
                Moments::F64(first, second) => {
                    *first = find("first", first.len())?.flatten_all()?.to_vec1()?;
                    *second = find("second", second.len())?.flatten_all()?.to_vec1()?;
                }
                Moments::Tensors(first, second) => {
                    for (kind, moment) in [("first", first), ("second", second)] {
                        let value = find(kind, moment.elem_count())?.reshape(moment.shape())?;
                        *moment = value.to_device(moment.device())?;
                    }
                }
            }
        }
        self.steps = steps;
        Ok(())
    }
}

/// The same optimizer for one vector of numbers beside the decoder's.
#[derive(Debug, Clone)]
pub(super) struct VectorAdamW {
    config: AdamWConfig,
    first: Vec<f64>,
    second: Vec<f64>,
    steps: usize,
}

impl VectorAdamW {
    pub(super) fn new(len: usize, config: AdamWConfig) -> Self {
        Self {
            config,
            first: vec![0.0; len],
            second: vec![0.0; len],
            steps: 0,
        }
    }

    /// Updates `values` in place and returns the gradient's norm.
    pub(super) fn step(
        &mut self,
        values: &mut [f64],
        gradient: &[f64],
        learning_rate: f64,
    ) -> Result<f64, TrainerError> {
        let norm = gradient.iter().map(|g| g * g).sum::<f64>().sqrt();
        if !norm.is_finite() {
            return Err(TrainerError::GradientNotFinite { norm });
        }
        self.steps += 1;
        let clip = self.config.clip_factor(norm);
        let update = Update::new(&self.config, learning_rate, clip, self.steps);
        update.apply(values, gradient, &mut self.first, &mut self.second);
        Ok(norm)
    }

    /// Returns the moments and the number of updates so far.
    pub(super) fn state(&self) -> (&[f64], &[f64], usize) {
        (&self.first, &self.second, self.steps)
    }

    pub(super) fn restore(&mut self, first: Vec<f64>, second: Vec<f64>, steps: usize) {
        (self.first, self.second, self.steps) = (first, second, steps);
    }
}

fn flat<T: Real>(values: Vec<T>) -> candle_core::Result<Tensor> {
    let len = values.len();
    Tensor::from_vec(values, len, &candle_core::Device::Cpu)
}

/// The numbers of one update.
#[derive(Debug, Clone, Copy)]
struct Update {
    beta1: f64,
    beta2: f64,
    /// Factor of the gradient.
    clip: f64,
    /// Factor of the old value: `1 - lr * weight_decay`.
    keep: f64,
    /// `lr / (1 - beta1^t)`.
    rate: f64,
    /// `1 / sqrt(1 - beta2^t)`.
    correction: f64,
    eps: f64,
}

impl Update {
    fn new(config: &AdamWConfig, learning_rate: f64, clip: f64, step: usize) -> Self {
        let exponent = i32::try_from(step).unwrap_or(i32::MAX);
        Self {
            beta1: config.beta1,
            beta2: config.beta2,
            clip,
            keep: 1.0 - learning_rate * config.weight_decay,
            rate: learning_rate / (1.0 - config.beta1.powi(exponent)),
            correction: 1.0 / (1.0 - config.beta2.powi(exponent)).sqrt(),
            eps: config.eps,
        }
    }

    /// Updates values and moments, in torch's order of operations.
    fn apply<T: Real>(self, values: &mut [T], gradient: &[T], first: &mut [T], second: &mut [T]) {
        let number = T::from_f64;
        let (beta1, beta2) = (number(self.beta1), number(self.beta2));
        let (rest1, rest2) = (number(1.0 - self.beta1), number(1.0 - self.beta2));
        let (clip, keep, rate) = (number(self.clip), number(self.keep), number(self.rate));
        let (correction, eps) = (number(self.correction), number(self.eps));
        values
            .par_chunks_mut(TASK_ELEMENTS)
            .zip(gradient.par_chunks(TASK_ELEMENTS))
            .zip(first.par_chunks_mut(TASK_ELEMENTS))
            .zip(second.par_chunks_mut(TASK_ELEMENTS))
            .for_each(|(((values, gradient), first), second)| {
                let moments = first.iter_mut().zip(second);
                for ((value, &gradient), (first, second)) in
                    values.iter_mut().zip(gradient).zip(moments)
                {
                    let gradient = gradient * clip;
                    *first = beta1 * *first + rest1 * gradient;
                    *second = beta2 * *second + rest2 * gradient * gradient;
                    let step = *first / (second.sqrt() * correction + eps);
                    *value = *value * keep - rate * step;
                }
            });
    }

    fn in_place<T: Real>(
        self,
        var: &Var,
        gradient: &[T],
        first: &mut [T],
        second: &mut [T],
    ) -> Result<(), TrainerError> {
        let moments = Mutex::new((first, second));
        let op = InPlace {
            update: self,
            gradient,
            moments,
        };
        // The autograd graph does not see the write: no graph outlives a step.
        var.as_tensor().inplace_op1(&op)?;
        Ok(())
    }

    fn composed(
        self,
        var: &Var,
        gradient: &Tensor,
        first: &mut Tensor,
        second: &mut Tensor,
    ) -> Result<(), TrainerError> {
        let gradient = (gradient.to_dtype(var.dtype())? * self.clip)?;
        *first = ((&*first * self.beta1)? + (&gradient * (1.0 - self.beta1))?)?;
        *second = ((&*second * self.beta2)? + (gradient.sqr()? * (1.0 - self.beta2))?)?;
        let step = (&*first / ((second.sqrt()? * self.correction)? + self.eps)?)?;
        let value = ((var.as_detached_tensor() * self.keep)? - (step * self.rate)?)?;
        var.set(&value)?;
        Ok(())
    }
}

/// [`Update::apply`] as candle lets a variable's storage be written.
struct InPlace<'a, T> {
    update: Update,
    gradient: &'a [T],
    moments: Mutex<(&'a mut [T], &'a mut [T])>,
}

impl<T: Real> InplaceOp1 for InPlace<'_, T> {
    fn name(&self) -> &'static str {
        "adamw"
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, layout: &Layout) -> candle_core::Result<()> {
        let Some((start, end)) = layout.contiguous_offsets() else {
            candle_core::bail!("a variable is contiguous")
        };
        let mut moments = self
            .moments
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner);
        let (first, second) = &mut *moments;
        let values = T::slice_mut(storage)?;
        self.update
            .apply(&mut values[start..end], self.gradient, first, second);
        Ok(())
    }
}

/// Returns the values behind one clipped update of a single variable.
#[cfg(test)]
pub(super) fn one_step_for_tests(
    values: &[f64],
    gradient: &[f64],
    learning_rate: f64,
    config: AdamWConfig,
) -> Vec<f64> {
    let norm = gradient.iter().map(|g| g * g).sum::<f64>().sqrt();
    let clip = config.clip_factor(norm);
    let mut values = values.to_vec();
    let (mut first, mut second) = (vec![0.0; values.len()], vec![0.0; values.len()]);
    Update::new(&config, learning_rate, clip, 1).apply(
        &mut values,
        gradient,
        &mut first,
        &mut second,
    );
    values
}
