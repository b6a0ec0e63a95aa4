//! Weights with a name, and linear layers with an optional adapter.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock};

use candle_core::{DType, Device, Shape, Tensor, Var};

use super::lora::LoraConfig;
use super::ops::{Packed, Panels, Real, Values, WeightFormat};
use super::weights::{Weights, lora_a};
use super::{ModelError, Trainable};

/// One tensor of the model.
///
/// A trainable one is a [`Var`] in disguise: the optimizer writes into its storage, which every
/// forward pass reads, sampler and trainer alike.
#[derive(Debug, Clone)]
pub(crate) struct Parameter {
    name: String,
    values: Stored,
    slot: Option<usize>,
}

/// Where a parameter's numbers are.
#[derive(Debug, Clone)]
enum Stored {
    Tensor(Tensor),
    /// A frozen matrix of the CPU's kernels: in panels and nowhere else.
    Packed(Packed),
    /// A matrix of the CPU's kernels that training changes: panels beside it, made anew after each
    /// update.
    Variable(Tensor, Arc<PanelCache>),
}

/// The panels of a variable, and the version of the weights that they were made of.
#[derive(Debug)]
struct PanelCache {
    version: Arc<AtomicU64>,
    format: WeightFormat,
    packed: RwLock<Option<(u64, Packed)>>,
}

impl PanelCache {
    fn packed(&self, tensor: &Tensor) -> candle_core::Result<Packed> {
        let version = self.version.load(Ordering::Acquire);
        let current = |packed: &Option<(u64, Packed)>| match packed {
            Some((made_of, packed)) if *made_of == version => Some(packed.clone()),
            _ => None,
        };
        if let Some(packed) = current(&self.packed.read().unwrap_or_else(PoisonError::into_inner)) {
            return Ok(packed);
        }
        let mut cached = self.packed.write().unwrap_or_else(PoisonError::into_inner);
        if let Some(packed) = current(&cached) {
            return Ok(packed);
        }
        let packed = Packed::new(tensor, self.format)?;
        *cached = Some((version, packed.clone()));
        Ok(packed)
    }
}

impl Parameter {
    /// Returns a tensor that no training changes.
    pub(super) fn frozen(name: String, tensor: &Tensor) -> Self {
        Self {
            name,
            values: Stored::Tensor(tensor.detach()),
            slot: None,
        }
    }

    /// Packs a frozen matrix for the CPU's kernels.
    pub(super) fn packed(mut self, format: WeightFormat) -> candle_core::Result<Self> {
        if let (Stored::Tensor(tensor), None) = (&self.values, self.slot) {
            self.values = Stored::Packed(Packed::new(tensor, format)?);
        }
        Ok(self)
    }

    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// Returns the tensor.
    ///
    /// # Panics
    ///
    /// Panics if it is a frozen matrix of the CPU's kernels: [`Parameter::to_tensor`] copies that.
    pub(crate) fn tensor(&self) -> &Tensor {
        match &self.values {
            Stored::Tensor(tensor) | Stored::Variable(tensor, _) => tensor,
            Stored::Packed(_) => panic!("`{}` is packed", self.name),
        }
    }

    /// Returns the tensor, or a copy of it if it is packed.
    pub(crate) fn to_tensor(&self) -> candle_core::Result<Tensor> {
        match &self.values {
            Stored::Tensor(tensor) | Stored::Variable(tensor, _) => Ok(tensor.clone()),
            Stored::Packed(packed) => packed.to_tensor(),
        }
    }

    /// Returns the index among the trainable variables, if this is one.
    pub(crate) fn slot(&self) -> Option<usize> {
        self.slot
    }

    /// Returns the matrix as products read it.
    pub(crate) fn panels<T: Real>(&self) -> candle_core::Result<Arc<Panels<T>>> {
        match &self.values {
            Stored::Packed(packed) => packed.panels(),
            Stored::Variable(tensor, cache) => cache.packed(tensor)?.panels(),
            Stored::Tensor(tensor) => Packed::new(tensor, WeightFormat::Wide)?.panels(),
        }
    }

    /// Copies rows of the matrix to `target`, one after the other.
    pub(crate) fn copy_rows<T: Real>(
        &self,
        indices: &[u32],
        target: &mut [T],
    ) -> candle_core::Result<()> {
        if let Stored::Packed(packed) = &self.values {
            packed.panels::<T>()?.copy_rows(indices, target);
            return Ok(());
        }
        let values = Values::<T>::of(self.tensor())?;
        let width = target.len() / indices.len().max(1);
        for (&index, target) in indices.iter().zip(target.chunks_exact_mut(width.max(1))) {
            target.copy_from_slice(&values[index as usize * width..][..width]);
        }
        Ok(())
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

impl Linear {
    /// Returns all that the layer is made of.
    pub(super) fn parameters(&self) -> impl Iterator<Item = &Parameter> {
        let adapter = self.lora.iter().flat_map(|lora| [&lora.a, &lora.b]);
        std::iter::once(&self.weight)
            .chain(&self.bias)
            .chain(adapter)
    }
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

impl Lora {
    /// Returns a number that no other adapter that is trained has.
    pub(super) fn module(&self) -> usize {
        self.a.slot().unwrap_or(usize::MAX)
    }
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
    /// Of the matrices that no training changes.
    format: WeightFormat,
    variables: Vec<(String, Var)>,
    version: Arc<AtomicU64>,
}

impl<'a> ParameterBuilder<'a> {
    pub(super) fn new(
        weights: Weights,
        trainable: &'a Trainable,
        dtype: DType,
        device: &'a Device,
        seed: u64,
        is_fused: bool,
        format: WeightFormat,
    ) -> Self {
        Self {
            weights,
            trainable,
            device,
            dtype,
            seed,
            is_fused,
            format,
            variables: Vec::new(),
            version: Arc::default(),
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
        if self.is_fused && weight.slot.is_some() {
            weight.values = self.with_panels(weight.values, WeightFormat::Wide);
        } else if self.is_fused {
            weight = weight.packed(self.format)?;
        }
        Ok(weight)
    }

    fn with_panels(&self, values: Stored, format: WeightFormat) -> Stored {
        match values {
            Stored::Tensor(tensor) => {
                let cache = PanelCache {
                    version: Arc::clone(&self.version),
                    format,
                    packed: RwLock::default(),
                };
                Stored::Variable(tensor, Arc::new(cache))
            }
            values => values,
        }
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
        let dtype = self.trained_dtype();
        let stream = self.variables.len() as u64;
        let a = lora_a(config.rank, inputs, self.seed, stream, dtype, self.device)?;
        let b = Tensor::zeros((outputs, config.rank), dtype, self.device)?;
        let mut a = self.variable(format!("{path}.lora_A.weight"), &a)?;
        let mut b = self.variable(format!("{path}.lora_B.weight"), &b)?;
        if self.is_fused {
            let format = self.format.of_adapters();
            a.values = self.with_panels(a.values, format);
            b.values = self.with_panels(b.values, format);
        }
        Ok(Lora {
            a,
            b,
            rank: config.rank,
            scale: config.scale(),
        })
    }

    /// Returns a copy of a frozen matrix that is trained beside it. It starts as the numbers that the
    /// other is held in, so that both compute alike.
    pub(super) fn trained_copy(
        &mut self,
        frozen: &Parameter,
        name: &str,
    ) -> Result<Parameter, ModelError> {
        let tensor = frozen.to_tensor()?.to_dtype(self.trained_dtype())?;
        let mut copy = self.variable(name.to_owned(), &tensor)?;
        if self.is_fused {
            copy.values = self.with_panels(copy.values, WeightFormat::Wide);
        }
        Ok(copy)
    }

    /// Adapters are trained in `f32` even on a half-precision base.
    fn trained_dtype(&self) -> DType {
        match self.dtype {
            DType::F64 => DType::F64,
            _ => DType::F32,
        }
    }

    fn variable(&mut self, name: String, tensor: &Tensor) -> Result<Parameter, ModelError> {
        let var = Var::from_tensor(tensor)?;
        let parameter = Parameter {
            name: name.clone(),
            values: Stored::Tensor(var.as_tensor().clone()),
            slot: Some(self.variables.len()),
        };
        self.variables.push((name, var));
        Ok(parameter)
    }

    /// Returns the number that must grow whenever the variables are changed.
    pub(super) fn version(&self) -> Arc<AtomicU64> {
        Arc::clone(&self.version)
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
