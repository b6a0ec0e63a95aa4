//! The decoder's pass that generates, on devices that are not the CPU: keys and values in blocks, on the
//! kernels of [`cuda`](super::cuda) between products of the tensor library.
//!
//! It rounds where the passes for training ([`composed`](super::composed)) do, except within attention,
//! where it keeps scores and probabilities in single precision.

use candle_core::Tensor;

use super::adapters::RowAdapters;
use super::composed::{apply, embed};
use super::cuda::{self, PagedStep};
use super::decoder::{Decoder, Layer};
use super::linear::{Linear, Parameter};
use super::{Adapters, ModelError, PackedBatch};
use crate::engine::kv_cache::{KvCache, PagedRows, RowId};

/// What every layer of one pass shares.
struct Pass<'a> {
    decoder: &'a Decoder,
    adapters: RowAdapters,
    pool: &'a Tensor,
    step: PagedStep,
    /// Cosines and sines by position.
    table: Tensor,
}

/// Returns the hidden states of new tokens and appends their keys and values to the cache.
pub(super) fn hidden_cached(
    decoder: &Decoder,
    batch: &PackedBatch,
    cache: &mut KvCache,
    rows: &[RowId],
) -> Result<Tensor, ModelError> {
    let added: Vec<usize> = batch.segments().iter().map(std::ops::Range::len).collect();
    cache.with_pages(rows, &added, |paged| {
        batch.check_continues(paged.lengths())?;
        let pass = Pass::new(decoder, batch, paged)?;
        let mut x = embed(decoder, batch, Adapters::On)?;
        let mut delta = None;
        for (index, layer) in decoder.layers().iter().enumerate() {
            let (middle, output) = pass.layer(index, layer, &x, delta.as_ref())?;
            (x, delta) = (middle, Some(output));
        }
        let (_, hidden) = pass.add_norm(&x, delta.as_ref(), decoder.norm())?;
        Ok(hidden.detach())
    })
}

impl<'a> Pass<'a> {
    fn new(
        decoder: &'a Decoder,
        batch: &PackedBatch,
        paged: &'a PagedRows<'a>,
    ) -> Result<Self, ModelError> {
        let last = batch.positions().iter().max();
        let positions = last.map_or(0, |&last| last as usize + 1);
        Ok(Self {
            decoder,
            adapters: decoder.row_adapters(batch, Adapters::On)?,
            pool: paged.pool().0,
            step: PagedStep::new(batch, paged, decoder.device())?,
            table: decoder.rotary().rows(positions)?,
        })
    }

    fn linear(&self, linear: &Linear, x: &Tensor) -> candle_core::Result<Tensor> {
        // Variables would make a graph.
        Ok(apply(linear, &self.adapters, x)?.detach())
    }

    fn add_norm(
        &self,
        x: &Tensor,
        delta: Option<&Tensor>,
        weight: &Parameter,
    ) -> candle_core::Result<(Tensor, Tensor)> {
        let eps = self.decoder.config().rms_norm_eps;
        cuda::add_norm(x, delta, weight.tensor(), eps)
    }

    /// Returns heads `[n, heads, head_dim]`, normalised and rotated.
    fn rotated(
        &self,
        x: &Tensor,
        heads: usize,
        norm: Option<&Parameter>,
    ) -> candle_core::Result<Tensor> {
        let config = self.decoder.config();
        let x = x.reshape((x.dim(0)?, heads, config.head_dim))?;
        let norm = norm.map(Parameter::tensor);
        cuda::rotate(&x, norm, config.rms_norm_eps, &self.table, &self.step)
    }

    /// Runs a layer on `x + delta`; returns the two parts of its output, whose sum is the next layer's
    /// input.
    fn layer(
        &self,
        index: usize,
        layer: &Layer,
        x: &Tensor,
        delta: Option<&Tensor>,
    ) -> candle_core::Result<(Tensor, Tensor)> {
        let config = self.decoder.config();
        let (x, normed) = self.add_norm(x, delta, &layer.input_norm)?;
        let q = self.linear(&layer.q_proj, &normed)?;
        let k = self.linear(&layer.k_proj, &normed)?;
        let v = self.linear(&layer.v_proj, &normed)?;
        let q = self.rotated(&q, config.num_attention_heads, layer.q_norm.as_ref())?;
        let k = self.rotated(&k, config.num_key_value_heads, layer.k_norm.as_ref())?;
        cuda::write_tokens(self.pool, index, &self.step, &k, &v)?;
        let attended = cuda::attend(&q, self.pool, index, &self.step)?;
        let output = self.linear(&layer.o_proj, &attended)?;
        let (middle, normed) = self.add_norm(&x, Some(&output), &layer.post_norm)?;
        let gate = self.linear(&layer.gate_proj, &normed)?;
        let up = self.linear(&layer.up_proj, &normed)?;
        let output = self.linear(&layer.down_proj, &cuda::swiglu(&gate, &up)?)?;
        Ok((middle, output))
    }
}
