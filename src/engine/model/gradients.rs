//! Gradients of a decoder's variables, summed over micro-batches.

use std::sync::Arc;

use candle_core::{DType, Device, Shape, Tensor};
use rayon::prelude::*;

use super::ModelError;
use super::ops::{Real, into_tensor};

/// Elements summed into one partial sum of squares. Fixed, so that the norm does not depend on the
/// number of threads.
const NORM_CHUNK: usize = 1 << 14;

/// One accumulator for each variable, in the order of [`Decoder::variables`].
///
/// Backward passes add to it; nothing divides it, so the caller weighs each token by the
/// denominator of the whole optimizer step.
///
/// [`Decoder::variables`]: super::Decoder::variables
#[derive(Debug, Clone)]
pub struct Gradients {
    variables: Arc<[(String, Shape)]>,
    sums: Sums,
}

#[derive(Debug, Clone)]
enum Sums {
    F32(Vec<Vec<f32>>),
    F64(Vec<Vec<f64>>),
    Tensors {
        sums: Vec<Option<Tensor>>,
        device: Device,
    },
}

impl Gradients {
    /// Returns zeros. `fused` says whether the CPU's own backward pass will add to them.
    pub(crate) fn zeros(
        variables: Vec<(String, Shape)>,
        dtype: DType,
        device: &Device,
        fused: bool,
    ) -> Self {
        let lengths = variables.iter().map(|(_, shape)| shape.elem_count());
        let sums = match (fused, dtype) {
            (true, DType::F64) => Sums::F64(lengths.map(|len| vec![0.0; len]).collect()),
            (true, _) => Sums::F32(lengths.map(|len| vec![0.0; len]).collect()),
            (false, _) => Sums::Tensors {
                sums: vec![None; variables.len()],
                device: device.clone(),
            },
        };
        Self {
            variables: variables.into(),
            sums,
        }
    }

    /// Returns the number of variables.
    pub fn len(&self) -> usize {
        self.variables.len()
    }

    /// Returns whether there are no variables.
    pub fn is_empty(&self) -> bool {
        self.variables.is_empty()
    }

    /// Returns the name of variable `index`.
    pub fn name(&self, index: usize) -> &str {
        &self.variables[index].0
    }

    /// Sets all sums to zero, keeping their memory.
    pub fn clear(&mut self) {
        match &mut self.sums {
            Sums::F32(sums) => sums.iter_mut().for_each(|sum| sum.fill(0.0)),
            Sums::F64(sums) => sums.iter_mut().for_each(|sum| sum.fill(0.0)),
            Sums::Tensors { sums, .. } => sums.fill(None),
        }
    }

    /// Returns the gradient of variable `index` as a tensor of the variable's shape.
    ///
    /// # Errors
    ///
    /// Fails if the tensor library does.
    pub fn tensor(&self, index: usize) -> Result<Tensor, ModelError> {
        let shape = &self.variables[index].1;
        Ok(match &self.sums {
            Sums::F32(sums) => into_tensor(sums[index].clone(), shape)?,
            Sums::F64(sums) => into_tensor(sums[index].clone(), shape)?,
            Sums::Tensors { sums, device } => match &sums[index] {
                Some(sum) => sum.clone(),
                None => Tensor::zeros(shape, DType::F32, device)?,
            },
        })
    }

    /// Returns the Euclidean norm over all variables.
    ///
    /// # Errors
    ///
    /// Fails if the tensor library does.
    pub fn norm(&self) -> Result<f64, ModelError> {
        let mut total = 0.0;
        for index in 0..self.len() {
            total += match &self.sums {
                Sums::F32(sums) => sum_of_squares(&sums[index]),
                Sums::F64(sums) => sum_of_squares(&sums[index]),
                Sums::Tensors { sums, .. } => match &sums[index] {
                    Some(sum) => sum
                        .sqr()?
                        .sum_all()?
                        .to_dtype(DType::F64)?
                        .to_scalar::<f64>()?,
                    None => 0.0,
                },
            };
        }
        Ok(total.sqrt())
    }

    /// Returns the sums of variable `index` if the CPU's own backward pass keeps them in `f32`.
    pub fn values_f32(&self, index: usize) -> Option<&[f32]> {
        if let Sums::F32(sums) = &self.sums {
            Some(&sums[index])
        } else {
            None
        }
    }

    /// Adds `gradient` to variable `index`.
    pub(crate) fn add_tensor(&mut self, index: usize, gradient: &Tensor) -> Result<(), ModelError> {
        if let Sums::Tensors { sums, .. } = &mut self.sums {
            let gradient = gradient.detach();
            sums[index] = Some(match sums[index].take() {
                Some(sum) => (sum + gradient)?,
                None => gradient,
            });
            return Ok(());
        }
        Err(ModelError::Mismatch {
            what: "gradients kept as tensors",
            found: 0,
            expected: 1,
        })
    }
}

/// All numbers of a gradient, variable after variable.
#[derive(Debug, Clone, PartialEq)]
pub enum FlatGradient {
    /// In single precision.
    F32(Vec<f32>),
    /// In double precision.
    F64(Vec<f64>),
}

impl Gradients {
    /// Returns all sums in one piece, in host memory.
    ///
    /// # Errors
    ///
    /// Fails if the tensor library does.
    pub fn into_flat(self) -> Result<FlatGradient, ModelError> {
        let count = self.variables.iter().map(|(_, shape)| shape.elem_count());
        let count = count.sum();
        Ok(match self.sums {
            Sums::F32(sums) => FlatGradient::F32(joined(sums, count)),
            Sums::F64(sums) => FlatGradient::F64(joined(sums, count)),
            Sums::Tensors { .. } => {
                let mut flat = Vec::with_capacity(count);
                for index in 0..self.len() {
                    let tensor = self.tensor(index)?.to_dtype(DType::F32)?.flatten_all()?;
                    flat.extend(tensor.to_vec1::<f32>()?);
                }
                FlatGradient::F32(flat)
            }
        })
    }

    /// Sets all sums to what [`Gradients::into_flat`] returned for gradients of the same decoder.
    ///
    /// # Errors
    ///
    /// Fails if they are of another kind or number, or if the tensor library does.
    pub fn set_flat(&mut self, flat: &FlatGradient) -> Result<(), ModelError> {
        let expected = self.variables.iter().map(|(_, shape)| shape.elem_count());
        let (expected, found) = (
            expected.sum(),
            match flat {
                FlatGradient::F32(numbers) => numbers.len(),
                FlatGradient::F64(numbers) => numbers.len(),
            },
        );
        let wrong = |what| ModelError::Mismatch {
            what,
            found,
            expected,
        };
        if found != expected {
            return Err(wrong("numbers of a gradient"));
        }
        match (&mut self.sums, flat) {
            (Sums::F32(sums), FlatGradient::F32(numbers)) => set(sums, numbers),
            (Sums::F64(sums), FlatGradient::F64(numbers)) => set(sums, numbers),
            (Sums::Tensors { sums, device }, FlatGradient::F32(numbers)) => {
                let mut rest = numbers.as_slice();
                for (sum, (_, shape)) in sums.iter_mut().zip(self.variables.iter()) {
                    let (values, behind) = rest.split_at(shape.elem_count());
                    *sum = Some(Tensor::from_slice(values, shape, device)?);
                    rest = behind;
                }
            }
            _ => return Err(wrong("numbers of a gradient in another precision")),
        }
        Ok(())
    }

    /// Gives each sum that is kept as a tensor, contiguous and in `f32`, to `change`, which may change it
    /// in place.
    ///
    /// # Errors
    ///
    /// Fails where `change` does, if sums are not kept as tensors, or if the tensor library fails.
    pub fn for_each_tensor<E: From<ModelError>>(
        &mut self,
        change: impl Fn(&Tensor) -> Result<(), E>,
    ) -> Result<(), E> {
        for index in 0..self.len() {
            let tensor = self.tensor(index)?;
            let tensor = tensor.to_dtype(DType::F32).and_then(|sum| sum.contiguous());
            let tensor = tensor.map_err(ModelError::from)?;
            change(&tensor)?;
            let Sums::Tensors { sums, .. } = &mut self.sums else {
                return Err(E::from(ModelError::Mismatch {
                    what: "gradients kept as tensors",
                    found: 0,
                    expected: 1,
                }));
            };
            sums[index] = Some(tensor);
        }
        Ok(())
    }
}

fn joined<T>(sums: Vec<Vec<T>>, count: usize) -> Vec<T> {
    let mut flat = Vec::with_capacity(count);
    // One after the other, each is freed as soon as it is copied.
    sums.into_iter().for_each(|sum| flat.extend(sum));
    flat
}

fn set<T: Copy>(sums: &mut [Vec<T>], numbers: &[T]) {
    let mut rest = numbers;
    for sum in sums {
        let (values, behind) = rest.split_at(sum.len());
        sum.copy_from_slice(values);
        rest = behind;
    }
}

fn sum_of_squares<T: Real>(values: &[T]) -> f64 {
    let partial: Vec<f64> = values
        .par_chunks(NORM_CHUNK)
        .map(|chunk| {
            chunk
                .iter()
                .map(|value| value.to_f64() * value.to_f64())
                .sum()
        })
        .collect();
    partial.iter().sum()
}

/// The number types that the CPU's own backward pass sums in.
pub(crate) trait GradientReal: Real {
    /// Returns the sums of variable `index`.
    ///
    /// # Panics
    ///
    /// Panics if the gradients were made for another type: they come from the same decoder.
    fn sums(gradients: &mut Gradients, index: usize) -> &mut [Self];
}

impl GradientReal for f32 {
    fn sums(gradients: &mut Gradients, index: usize) -> &mut [Self] {
        match &mut gradients.sums {
            Sums::F32(sums) => &mut sums[index],
            _ => unreachable!("the decoder checks that gradients are its own"),
        }
    }
}

impl GradientReal for f64 {
    fn sums(gradients: &mut Gradients, index: usize) -> &mut [Self] {
        match &mut gradients.sums {
            Sums::F64(sums) => &mut sums[index],
            _ => unreachable!("the decoder checks that gradients are its own"),
        }
    }
}

impl Gradients {
    /// Returns whether these gradients were made by a decoder with these variables and numbers.
    pub(crate) fn fit(&self, variables: usize, dtype: DType, fused: bool) -> bool {
        let kind = match &self.sums {
            Sums::F32(_) => fused && dtype == DType::F32,
            Sums::F64(_) => fused && dtype == DType::F64,
            Sums::Tensors { .. } => !fused,
        };
        kind && self.variables.len() == variables
    }
}
