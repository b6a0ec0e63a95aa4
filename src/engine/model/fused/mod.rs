//! The decoder on the CPU: forward passes, and a backward pass written by hand.
//!
//! Candle's autograd keeps every intermediate, allocates and adds a zero tensor for each gradient,
//! and builds the gradients of frozen weights too. Here each layer keeps what its own backward pass
//! reads and nothing else, weight gradients are summed in place over micro-batches, and frozen
//! weights cost no more than their part of the chain rule. The plain-tensor twin in
//! [`composed`](super::composed) differentiates through candle and must give the same numbers.

mod dropout;
mod layer;
mod linear;

use std::sync::{Arc, Mutex, PoisonError};

use candle_core::DType;

use super::adapters::RowAdapters;
use super::decoder::Decoder;
use super::dropout::RowDropout;
use super::gradients::{GradientReal, Gradients};
use super::ops::{self, Real, RopeTable, Values, into_tensor};
use super::{Adapters, ModelConfig, ModelError, PackedBatch};
use crate::engine::kv_cache::{CacheReal, KvCache, RowId};
use layer::{Keep, LayerTape};

/// What a forward pass on the CPU keeps for its backward pass.
pub(super) struct FusedTape<T: Real> {
    layers: Vec<LayerTape<T>>,
    /// Input of the final norm, `[n, hidden]`.
    last: Vec<T>,
    dropout: Option<RowDropout>,
}

/// The number types that this pass is written for.
pub(super) trait FusedReal: GradientReal + CacheReal {
    fn rope(table: &FusedRope) -> &RopeTable<Self>;
}

/// Rotary tables in the numbers of the model.
#[derive(Debug)]
pub(super) enum FusedRope {
    F32(RopeTable<f32>),
    F64(RopeTable<f64>),
}

impl FusedRope {
    pub(super) fn new(dtype: DType, config: &ModelConfig) -> Self {
        let scaling = &config.rope_scaling;
        let frequencies = scaling.frequencies(config.head_dim, config.rope_theta);
        let scale = scaling.attention_factor();
        match dtype {
            DType::F64 => Self::F64(RopeTable::new(frequencies, scale)),
            _ => Self::F32(RopeTable::new(frequencies, scale)),
        }
    }
}

impl FusedReal for f32 {
    fn rope(table: &FusedRope) -> &RopeTable<Self> {
        match table {
            FusedRope::F32(table) => table,
            FusedRope::F64(_) => unreachable!("the decoder dispatches on its own type"),
        }
    }
}

impl FusedReal for f64 {
    fn rope(table: &FusedRope) -> &RopeTable<Self> {
        match table {
            FusedRope::F64(table) => table,
            FusedRope::F32(_) => unreachable!("the decoder dispatches on its own type"),
        }
    }
}

/// What every layer of one pass shares.
struct Pass<'a, T> {
    decoder: &'a Decoder,
    batch: &'a PackedBatch,
    rope: Arc<ops::RopeRows<T>>,
    adapters: RowAdapters,
}

impl<'a, T: FusedReal> Pass<'a, T> {
    fn new(
        decoder: &'a Decoder,
        batch: &'a PackedBatch,
        adapters: Adapters,
    ) -> Result<Self, ModelError> {
        let positions = batch
            .positions()
            .iter()
            .max()
            .map_or(0, |&last| last as usize + 1);
        let rope = T::rope(decoder.fused_rope()).rows(positions);
        Ok(Self {
            decoder,
            batch,
            rope,
            adapters: decoder.row_adapters(batch, adapters)?,
        })
    }

    /// Returns a pass of training, which drops what `dropout` says.
    fn of_training(
        decoder: &'a Decoder,
        batch: &'a PackedBatch,
        dropout: Option<RowDropout>,
    ) -> Result<Self, ModelError> {
        let mut pass = Self::new(decoder, batch, Adapters::On)?;
        pass.adapters.dropout = dropout;
        Ok(pass)
    }

    fn embed(&self) -> Result<Vec<T>, ModelError> {
        let width = self.decoder.config().hidden_size;
        let mut x = vec![T::ZERO; self.batch.len() * width];
        let table = self.decoder.embedding(self.adapters.own);
        table.copy_rows(self.batch.tokens(), &mut x)?;
        Ok(x)
    }

    fn final_norm(&self, x: &[T]) -> Result<Vec<T>, ModelError> {
        let weight = Values::<T>::of(self.decoder.norm().tensor())?;
        let mut y = vec![T::ZERO; x.len()];
        ops::rms_norm(x, &weight, self.decoder.config().rms_norm_eps, &mut y);
        Ok(y)
    }
}

/// Runs a pass on one of rayon's threads, from where its many small loops are shared with the others
/// in a microsecond; each would take the caller's thread to sleep and back otherwise.
fn in_pool<R: Send>(pass: impl FnOnce() -> R + Send) -> R {
    rayon::scope(|_| pass())
}

/// Runs a pass that keeps much on the first of rayon's threads, whoever calls: allocators keep free
/// memory by thread, and what one micro-batch has freed must serve the next.
fn on_first_thread<R: Send>(pass: impl FnOnce() -> R + Send) -> R {
    let pass = Mutex::new(Some(pass));
    let result = Mutex::new(None);
    rayon::broadcast(|context| {
        if context.index() == 0 {
            let pass = pass.lock().unwrap_or_else(PoisonError::into_inner).take();
            let value = pass.map(|pass| pass());
            *result.lock().unwrap_or_else(PoisonError::into_inner) = value;
        }
    });
    let result = result.into_inner().unwrap_or_else(PoisonError::into_inner);
    result.expect("a pool has a first thread, which ran the pass")
}

/// Returns the hidden states `[n, hidden]` without keeping anything.
pub(super) fn hidden<T: FusedReal>(
    decoder: &Decoder,
    batch: &PackedBatch,
    adapters: Adapters,
) -> Result<Vec<T>, ModelError> {
    in_pool(|| {
        let pass = Pass::<T>::new(decoder, batch, adapters)?;
        let mut x = pass.embed()?;
        for layer in decoder.layers() {
            x = layer::forward(&pass, layer, x, Keep::Nothing)?.0;
        }
        pass.final_norm(&x)
    })
}

/// Returns the hidden states and the tape of their backward pass.
pub(super) fn forward<T: FusedReal>(
    decoder: &Decoder,
    batch: &PackedBatch,
    recompute: bool,
    dropout: Option<RowDropout>,
) -> Result<(Vec<T>, FusedTape<T>), ModelError> {
    on_first_thread(|| forward_in_pool(decoder, batch, recompute, dropout))
}

fn forward_in_pool<T: FusedReal>(
    decoder: &Decoder,
    batch: &PackedBatch,
    recompute: bool,
    dropout: Option<RowDropout>,
) -> Result<(Vec<T>, FusedTape<T>), ModelError> {
    let pass = Pass::<T>::of_training(decoder, batch, dropout)?;
    let keep = if recompute { Keep::Input } else { Keep::All };
    let mut x = pass.embed()?;
    let mut layers = Vec::with_capacity(decoder.layers().len());
    for layer in decoder.layers() {
        let (y, tape) = layer::forward(&pass, layer, x, keep)?;
        layers.extend(tape);
        x = y;
    }
    let hidden = pass.final_norm(&x)?;
    let tape = FusedTape {
        layers,
        last: x,
        dropout: pass.adapters.dropout,
    };
    Ok((hidden, tape))
}

/// Adds the gradients of all variables below the hidden states.
pub(super) fn backward<T: FusedReal>(
    decoder: &Decoder,
    batch: &PackedBatch,
    tape: FusedTape<T>,
    dhidden: &[T],
    gradients: &mut Gradients,
) -> Result<(), ModelError> {
    on_first_thread(|| backward_in_pool(decoder, batch, tape, dhidden, gradients))
}

fn backward_in_pool<T: FusedReal>(
    decoder: &Decoder,
    batch: &PackedBatch,
    tape: FusedTape<T>,
    dhidden: &[T],
    gradients: &mut Gradients,
) -> Result<(), ModelError> {
    let pass = Pass::<T>::of_training(decoder, batch, tape.dropout)?;
    let eps = decoder.config().rms_norm_eps;
    let mut dx = vec![T::ZERO; tape.last.len()];
    {
        let norm = decoder.norm();
        let weight = Values::<T>::of(norm.tensor())?;
        let dweight = norm.slot().map(|slot| T::sums(gradients, slot));
        ops::rms_norm_backward(&tape.last, &weight, eps, dhidden, &mut dx, dweight);
    }
    drop(tape.last);
    for (layer, tape) in decoder.layers().iter().zip(tape.layers).rev() {
        dx = layer::backward(&pass, layer, tape, dx, gradients)?;
    }
    if let Some(slot) = decoder.embedding(Adapters::On).slot() {
        let width = decoder.config().hidden_size;
        let sums = T::sums(gradients, slot);
        for (&token, dx) in batch.tokens().iter().zip(dx.chunks_exact(width)) {
            let sums = &mut sums[token as usize * width..(token as usize + 1) * width];
            for (sum, &dx) in sums.iter_mut().zip(dx) {
                *sum += dx;
            }
        }
    }
    Ok(())
}

/// Returns the hidden states of new tokens, all or the last of some segments, and appends the keys and
/// values of all to the cache.
pub(super) fn hidden_cached<T: FusedReal>(
    decoder: &Decoder,
    batch: &PackedBatch,
    cache: &mut KvCache,
    rows: &[RowId],
    tails: Option<&[usize]>,
) -> Result<Vec<T>, ModelError> {
    in_pool(|| hidden_cached_in_pool(decoder, batch, cache, rows, tails))
}

fn hidden_cached_in_pool<T: FusedReal>(
    decoder: &Decoder,
    batch: &PackedBatch,
    cache: &mut KvCache,
    rows: &[RowId],
    tails: Option<&[usize]>,
) -> Result<Vec<T>, ModelError> {
    let added: Vec<usize> = batch.segments().iter().map(std::ops::Range::len).collect();
    let pass = Pass::<T>::new(decoder, batch, Adapters::On)?;
    cache.with_blocks::<T, _>(rows, &added, |cached| {
        batch.check_continues(cached.lengths())?;
        let mut x = pass.embed()?;
        let last = decoder.layers().len() - 1;
        for (index, layer) in decoder.layers().iter().enumerate() {
            match tails.filter(|_| index == last) {
                None => layer::forward_cached(&pass, layer, index, &mut x, cached)?,
                Some(segments) => {
                    let tails = batch.tails(segments);
                    let tails = Pass::<T>::new(decoder, &tails, Adapters::On)?;
                    let (layer, pass) = (layer, &pass);
                    x = layer::forward_cached_tails(
                        pass, &tails, segments, layer, index, &x, cached,
                    )?;
                }
            }
        }
        pass.final_norm(&x)
    })
}

/// Returns `logits = hidden W^T`, `[m, vocab]`, for `m` rows.
pub(super) fn logits<T: Real>(
    decoder: &Decoder,
    hidden: &[T],
    rows: usize,
) -> Result<Vec<T>, ModelError> {
    let config = decoder.config();
    let weight = decoder.head(Adapters::On).panels::<T>()?;
    let mut logits = vec![T::ZERO; rows * config.vocab_size];
    let write = ops::Write::Replace;
    ops::linear(T::ONE, hidden, rows, &weight, write, &mut logits);
    Ok(logits)
}

/// Returns hidden states as a tensor `[n, hidden]`.
pub(super) fn hidden_tensor<T: Real>(
    decoder: &Decoder,
    values: Vec<T>,
) -> Result<candle_core::Tensor, ModelError> {
    let width = decoder.config().hidden_size;
    let rows = values.len() / width;
    Ok(into_tensor(values, (rows, width))?)
}
