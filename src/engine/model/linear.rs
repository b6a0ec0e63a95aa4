//! Weights with a name, and linear layers with an optional adapter.

use candle_core::{DType, Device, Shape, Tensor, Var};

use super::lora::LoraConfig;
use super::weights::{Weights, lora_a};
use super::{ModelError, Trainable};

/// One tensor of the model.
///
/// A trainable one is a [`Var`] in disguise: the optimizer writes into its storage, which every
/// forward pass reads, sampler and trainer alike.
#[derive(Debug, Clone)]
pub(crate) struct Parameter {
    name: String,
    tensor: Tensor,
    slot: Option<usize>,
}

impl Parameter {
    /// Returns a tensor that no training changes.
    pub(super) fn frozen(name: String, tensor: &Tensor) -> Self {
        Self {
            name,
            tensor: tensor.detach(),
            slot: None,
        }
    }

    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    pub(crate) fn tensor(&self) -> &Tensor {
        &self.tensor
    }

    /// Returns the index among the trainable variables, if this is one.
    pub(crate) fn slot(&self) -> Option<usize> {
        self.slot
    }
}

/// A linear layer: `y = x W^T + b + scale * (x A^T) B^T`.
#[derive(Debug, Clone)]
pub(crate) struct Linear {
    /// `[outputs, inputs]`.
    pub(crate) weight: Parameter,
    /// `[outputs]`.
    pub(crate) bias: Option<Parameter>,
    pub(crate) lora: Option<Lora>,
    pub(crate) inputs: usize,
    pub(crate) outputs: usize,
}

/// The low-rank update of one linear layer.
#[derive(Debug, Clone)]
pub(crate) struct Lora {
    /// `[rank, inputs]`.
    pub(crate) a: Parameter,
    /// `[outputs, rank]`.
    pub(crate) b: Parameter,
    pub(crate) rank: usize,
    pub(crate) scale: f64,
}

/// Returns whether a checkpoint may hold this tensor without need: a tied head may be stored all the
/// same, and old checkpoints store the rotary table.
pub(crate) fn is_redundant(name: &str) -> bool {
    name == "lm_head.weight" || name.ends_with("rotary_emb.inv_freq")
}

/// Takes tensors out of a checkpoint and counts the trainable ones.
pub(super) struct ParameterBuilder<'a> {
    weights: Weights,
    trainable: &'a Trainable,
    device: &'a Device,
    dtype: DType,
    seed: u64,
    is_fused: bool,
    variables: Vec<(String, Var)>,
}

impl<'a> ParameterBuilder<'a> {
    pub(super) fn new(
        weights: Weights,
        trainable: &'a Trainable,
        dtype: DType,
        device: &'a Device,
        seed: u64,
        is_fused: bool,
    ) -> Self {
        Self {
            weights,
            trainable,
            device,
            dtype,
            seed,
            is_fused,
            variables: Vec::new(),
        }
    }

    /// Takes the tensor `name`, which must have this shape.
    pub(super) fn take(
        &mut self,
        name: String,
        shape: impl Into<Shape>,
    ) -> Result<Parameter, ModelError> {
        let shape = shape.into();
        let Some(tensor) = self.weights.remove(&name) else {
            return Err(ModelError::MissingTensor { name });
        };
        if tensor.shape() != &shape {
            let (expected, found) = (shape.into_dims(), tensor.dims().to_vec());
            return Err(ModelError::TensorShape {
                name,
                expected,
                found,
            });
        }
        let tensor = tensor
            .to_device(self.device)?
            .to_dtype(self.dtype)?
            .contiguous()?;
        if matches!(self.trainable, Trainable::Full) {
            return self.variable(name, &tensor);
        }
        Ok(Parameter::frozen(name, &tensor))
    }

    /// Takes a matrix that tokens are multiplied with, laid out for that.
    pub(super) fn take_matrix(
        &mut self,
        name: String,
        outputs: usize,
        inputs: usize,
    ) -> Result<Parameter, ModelError> {
        let mut weight = self.take(name, (outputs, inputs))?;
        if self.is_fused && weight.slot.is_none() {
            // Contiguous along the outputs: small products then read it as it lies, where they would
            // spend most of their time rearranging it. A variable must be contiguous along its rows.
            weight.tensor = weight.tensor.t()?.contiguous()?.t()?;
        }
        Ok(weight)
    }

    /// Takes the linear layer at `path`, with an adapter if the training asks for one.
    pub(super) fn take_linear(
        &mut self,
        path: &str,
        outputs: usize,
        inputs: usize,
        has_bias: bool,
    ) -> Result<Linear, ModelError> {
        let weight = self.take_matrix(format!("{path}.weight"), outputs, inputs)?;
        let bias = has_bias
            .then(|| self.take(format!("{path}.bias"), outputs))
            .transpose()?;
        let lora = match self.trainable {
            Trainable::Lora(config) if config.adapts(path) => {
                Some(self.fresh_lora(path, config, outputs, inputs)?)
            }
            _ => None,
        };
        Ok(Linear {
            weight,
            bias,
            lora,
            inputs,
            outputs,
        })
    }

    fn fresh_lora(
        &mut self,
        path: &str,
        config: &LoraConfig,
        outputs: usize,
        inputs: usize,
    ) -> Result<Lora, ModelError> {
        // Adapters are trained in f32 even on a half-precision base.
        let dtype = if self.dtype == DType::F64 {
            DType::F64
        } else {
            DType::F32
        };
        let stream = self.variables.len() as u64;
        let a = lora_a(config.rank, inputs, self.seed, stream, dtype, self.device)?;
        let b = Tensor::zeros((outputs, config.rank), dtype, self.device)?;
        Ok(Lora {
            a: self.variable(format!("{path}.lora_A.weight"), &a)?,
            b: self.variable(format!("{path}.lora_B.weight"), &b)?,
            rank: config.rank,
            scale: config.scale(),
        })
    }

    fn variable(&mut self, name: String, tensor: &Tensor) -> Result<Parameter, ModelError> {
        let var = Var::from_tensor(tensor)?;
        let parameter = Parameter {
            name: name.clone(),
            tensor: var.as_tensor().clone(),
            slot: Some(self.variables.len()),
        };
        self.variables.push((name, var));
        Ok(parameter)
    }

    /// Returns the variables, if nothing but buffers is left of the checkpoint.
    pub(super) fn finish(mut self) -> Result<Vec<(String, Var)>, ModelError> {
        self.weights.retain(|name, _| !is_redundant(name));
        match self.weights.into_keys().min() {
            Some(name) => Err(ModelError::UnexpectedTensor { name }),
            None => Ok(self.variables),
        }
    }
}
