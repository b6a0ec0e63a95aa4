//! The decoder in plain tensor operations, for devices without kernels of our own.
//!
//! Differentiated by candle, piece by piece: the forward pass keeps each layer's input, and the backward
//! pass runs the layer again, in three pieces on variables of their own: what is before attention, some
//! heads of attention at a time, what is behind it. So memory is one piece's graph, and a long
//! sequence's scores are never held for all heads.
//!
//! Candle's fused operations (`rms_norm`, `rope`, `softmax_last_dim`) have no backward pass and detach
//! in silence; none of them is used here. Frozen weights enter through [`FrozenLinear`], since candle's
//! product would compute and keep their gradient.

use std::ops::Range;

use candle_core::backend::BackendStorage as _;
use candle_core::{
    CpuStorage, CudaStorage, CustomOp1, D, DType, Device, Layout, Shape, Storage, Tensor, Var,
};

use super::adapters::RowAdapters;
use super::decoder::{Decoder, Layer};
use super::dropout::RowDropout;
use super::gradients::Gradients;
use super::linear::{Linear, Lora, Parameter};
use super::{Adapters, ModelError, PackedBatch};

/// Scores of one group of segments and some of its heads held at a time, in elements: 256 MB of `f32`.
/// A single head's may be more.
pub(crate) const MAX_SCORES: usize = 1 << 26;

/// `y = x W^T` where `W` is no node of the graph.
struct FrozenLinear {
    weight: Tensor,
}

impl CustomOp1 for FrozenLinear {
    fn name(&self) -> &'static str {
        "frozen-linear"
    }

    fn cpu_fwd(&self, x: &CpuStorage, layout: &Layout) -> candle_core::Result<(CpuStorage, Shape)> {
        let (m, k) = layout.shape().dims2()?;
        let (weight, weight_layout) = self.weight.storage_and_layout();
        let weight_layout = weight_layout.transpose(0, 1)?;
        let n = weight_layout.dims()[1];
        match &*weight {
            Storage::Cpu(weight) => {
                let y = x.matmul(weight, (1, m, n, k), layout, &weight_layout)?;
                Ok((y, Shape::from((m, n))))
            }
            _ => candle_core::bail!("the weight and its input are on different devices"),
        }
    }

    fn cuda_fwd(
        &self,
        x: &CudaStorage,
        layout: &Layout,
    ) -> candle_core::Result<(CudaStorage, Shape)> {
        let (m, k) = layout.shape().dims2()?;
        let (weight, weight_layout) = self.weight.storage_and_layout();
        let weight_layout = weight_layout.transpose(0, 1)?;
        let n = weight_layout.dims()[1];
        match &*weight {
            Storage::Cuda(weight) => {
                let y = x.matmul(weight, (1, m, n, k), layout, &weight_layout)?;
                Ok((y, Shape::from((m, n))))
            }
            _ => candle_core::bail!("the weight and its input are on different devices"),
        }
    }

    fn bwd(&self, _x: &Tensor, _y: &Tensor, dy: &Tensor) -> candle_core::Result<Option<Tensor>> {
        Ok(Some(dy.contiguous()?.matmul(&self.weight)?))
    }
}

/// What every layer of one pass shares.
struct Pass<'a> {
    decoder: &'a Decoder,
    batch: &'a PackedBatch,
    /// Cosines and sines, `[n, 1, head_dim / 2]`.
    cos: Tensor,
    sin: Tensor,
    adapters: RowAdapters,
    layout: Vec<SegmentGroup>,
}

/// Segments that are attended together, padded to the longest of them.
struct SegmentGroup {
    segments: usize,
    /// Padded number of queries.
    queries: usize,
    /// Padded number of keys: a segment's tokens behind those of its ancestors.
    keys: usize,
    /// For each padded query, the token that stands there; the segment's first for padding.
    gather_queries: Tensor,
    /// The same for keys.
    gather_keys: Tensor,
    /// For each token of the group, its padded place among the queries.
    scatter: Tensor,
    /// Zero where a key may be seen, minus infinity where not: `[segments, 1, queries, keys]`.
    mask: Tensor,
}

impl<'a> Pass<'a> {
    fn new(
        decoder: &'a Decoder,
        batch: &'a PackedBatch,
        adapters: Adapters,
    ) -> Result<Self, ModelError> {
        let config = decoder.config();
        let device = decoder.device();
        let half = config.head_dim / 2;
        let (mut cos, mut sin) = (Vec::new(), Vec::new());
        let scaling = &config.rope_scaling;
        let frequencies = scaling.frequencies(config.head_dim, config.rope_theta);
        let scale = scaling.attention_factor();
        for &position in batch.positions() {
            for frequency in &frequencies {
                #[expect(clippy::cast_precision_loss, reason = "as transformers rounds")]
                let angle = f64::from(position as f32 * frequency);
                cos.push(scale * angle.cos());
                sin.push(scale * angle.sin());
            }
        }
        let shape = (batch.len(), 1, half);
        let wide = if decoder.dtype() == DType::F64 {
            DType::F64
        } else {
            DType::F32
        };
        let table = |values: Vec<f64>| {
            Tensor::from_vec(values, shape, &Device::Cpu)?
                .to_dtype(wide)?
                .to_device(device)
        };
        Ok(Self {
            decoder,
            batch,
            cos: table(cos)?,
            sin: table(sin)?,
            adapters: decoder.row_adapters(batch, adapters)?,
            layout: segment_groups(decoder, batch)?,
        })
    }

    /// Returns a pass that drops what `dropout` says before adapters.
    fn dropping(mut self, dropout: Option<RowDropout>) -> Self {
        self.adapters.dropout = dropout;
        self
    }

    fn embed(&self) -> Result<Tensor, ModelError> {
        embed(self.decoder, self.batch, self.adapters.own)
    }

    fn norm(&self, x: &Tensor, weight: &Parameter) -> candle_core::Result<Tensor> {
        let dtype = x.dtype();
        let wide = if dtype == DType::F64 {
            DType::F64
        } else {
            DType::F32
        };
        let x = x.to_dtype(wide)?;
        let mean = x.sqr()?.mean_keepdim(D::Minus1)?;
        let scale = (mean + self.decoder.config().rms_norm_eps)?
            .sqrt()?
            .recip()?;
        let weight = weight.tensor().to_dtype(wide)?;
        x.broadcast_mul(&scale)?
            .broadcast_mul(&weight)?
            .to_dtype(dtype)
    }

    fn linear(&self, linear: &Linear, x: &Tensor) -> candle_core::Result<Tensor> {
        apply(linear, &self.adapters, x)
    }

    /// Rotates `x` `[n, heads, head_dim]`.
    fn rope(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        let dtype = x.dtype();
        let half = self.decoder.config().head_dim / 2;
        let x = x.to_dtype(self.cos.dtype())?;
        let (low, high) = (
            x.narrow(D::Minus1, 0, half)?,
            x.narrow(D::Minus1, half, half)?,
        );
        let rotated_low = (low.broadcast_mul(&self.cos)? - high.broadcast_mul(&self.sin)?)?;
        let rotated_high = (high.broadcast_mul(&self.cos)? + low.broadcast_mul(&self.sin)?)?;
        Tensor::cat(&[rotated_low, rotated_high], D::Minus1)?.to_dtype(dtype)
    }

    /// Returns queries, keys and values, `[n, heads, head_dim]`.
    fn project(
        &self,
        layer: &Layer,
        normed: &Tensor,
    ) -> candle_core::Result<(Tensor, Tensor, Tensor)> {
        let config = self.decoder.config();
        let n = normed.dim(0)?;
        let heads = |x: Tensor, heads| x.reshape((n, heads, config.head_dim));
        let mut q = heads(
            self.linear(&layer.q_proj, normed)?,
            config.num_attention_heads,
        )?;
        let mut k = heads(
            self.linear(&layer.k_proj, normed)?,
            config.num_key_value_heads,
        )?;
        let v = heads(
            self.linear(&layer.v_proj, normed)?,
            config.num_key_value_heads,
        )?;
        if let (Some(q_norm), Some(k_norm)) = (&layer.q_norm, &layer.k_norm) {
            q = self.norm(&q, q_norm)?;
            k = self.norm(&k, k_norm)?;
        }
        Ok((self.rope(&q)?, self.rope(&k)?, v))
    }

    fn finish(&self, layer: &Layer, x: &Tensor, attended: &Tensor) -> candle_core::Result<Tensor> {
        let middle = (x + self.linear(&layer.o_proj, attended)?)?;
        let normed = self.norm(&middle, &layer.post_norm)?;
        let gate = self.linear(&layer.gate_proj, &normed)?;
        let up = self.linear(&layer.up_proj, &normed)?;
        let product = (gate.silu()? * up)?;
        middle + self.linear(&layer.down_proj, &product)?
    }

    /// Returns queries, keys and values of a layer's input.
    fn before_attention(&self, layer: &Layer, x: &Tensor) -> candle_core::Result<[Tensor; 3]> {
        let normed = self.norm(x, &layer.input_norm)?;
        let (q, k, v) = self.project(layer, &normed)?;
        Ok([q, k, v])
    }

    /// Returns the output of a layer, without a graph.
    fn layer(&self, layer: &Layer, x: &Tensor) -> candle_core::Result<Tensor> {
        let qkv = self.before_attention(layer, x)?.map(|x| x.detach());
        let attended = self.attention(&qkv)?;
        Ok(self.finish(layer, x, &attended)?.detach())
    }

    /// Adds the gradients of a layer's variables, and returns that of its input `x`.
    fn layer_backward(
        &self,
        layer: &Layer,
        x: &Tensor,
        dy: &Tensor,
        gradients: &mut Gradients,
    ) -> Result<Tensor, ModelError> {
        let qkv = self.before_attention(layer, x)?.map(|x| x.detach());
        let attended = self.attention(&qkv)?;
        let parameters = layer.parameters_after_attention();
        let [dattended, dmiddle] = chain(
            [&attended, x],
            [dy],
            &parameters,
            gradients,
            |[attended, x]| Ok([self.finish(layer, x, attended)?]),
        )?;
        drop(attended);
        let dqkv = self.attention_backward(&qkv, &dattended, gradients)?;
        let parameters = layer.parameters_before_attention();
        let [dx] = chain([x], dqkv.each_ref(), &parameters, gradients, |[x]| {
            self.before_attention(layer, x)
        })?;
        Ok((dmiddle + dx)?)
    }

    /// Returns the key heads of a group that are attended at a time.
    fn head_chunks(&self, group: &SegmentGroup) -> impl Iterator<Item = Range<usize>> + use<> {
        let config = self.decoder.config();
        let kv_heads = config.num_key_value_heads;
        let share = config.num_attention_heads / kv_heads;
        let scores = group.segments * share * group.queries * group.keys;
        // Toys must have several chunks, too.
        let most = if cfg!(test) { 256 } else { MAX_SCORES };
        let size = (most / scores.max(1)).clamp(1, kv_heads);
        (0..kv_heads)
            .step_by(size)
            .map(move |first| first..kv_heads.min(first + size))
    }

    /// Returns some key heads of queries, keys and values.
    fn heads_of(
        &self,
        qkv: &[Tensor; 3],
        heads: &Range<usize>,
    ) -> candle_core::Result<[Tensor; 3]> {
        let config = self.decoder.config();
        let share = config.num_attention_heads / config.num_key_value_heads;
        let [q, k, v] = qkv;
        let (first, count) = (heads.start, heads.len());
        Ok([
            q.narrow(1, share * first, share * count)?.contiguous()?,
            k.narrow(1, first, count)?.contiguous()?,
            v.narrow(1, first, count)?.contiguous()?,
        ])
    }

    /// Attends within all groups; returns `[n, heads * head_dim]`.
    fn attention(&self, qkv: &[Tensor; 3]) -> candle_core::Result<Tensor> {
        let mut groups = Vec::with_capacity(self.layout.len());
        for group in &self.layout {
            let mut parts = Vec::new();
            for heads in self.head_chunks(group) {
                let [q, k, v] = self.heads_of(qkv, &heads)?;
                parts.push(Self::attend(group, &q, &k, &v)?);
            }
            groups.push(Tensor::cat(&parts, 1)?);
        }
        Tensor::cat(&groups, 0)
    }

    /// Returns the gradients of queries, keys and values, given that of [`Pass::attention`].
    fn attention_backward(
        &self,
        qkv: &[Tensor; 3],
        dattended: &Tensor,
        gradients: &mut Gradients,
    ) -> Result<[Tensor; 3], ModelError> {
        let config = self.decoder.config();
        let width = config.num_attention_heads / config.num_key_value_heads * config.head_dim;
        let mut sums: Option<[Tensor; 3]> = None;
        let mut done = 0;
        for group in &self.layout {
            let tokens = group.scatter.dim(0)?;
            let dgroup = dattended.narrow(0, done, tokens)?;
            done += tokens;
            let mut parts: [Vec<Tensor>; 3] = Default::default();
            for heads in self.head_chunks(group) {
                let some = self.heads_of(qkv, &heads)?;
                let doutput = dgroup.narrow(1, width * heads.start, width * heads.len())?;
                let found = chain(some.each_ref(), [&doutput], &[], gradients, |[q, k, v]| {
                    Ok([Self::attend(group, q, k, v)?])
                })?;
                for (parts, part) in parts.iter_mut().zip(found) {
                    parts.push(part);
                }
            }
            let [q, k, v] = parts.each_ref().map(|parts| Tensor::cat(parts, 1));
            let found = [q?, k?, v?];
            // Groups may see the same keys.
            sums = Some(match sums {
                Some([q, k, v]) => [(q + &found[0])?, (k + &found[1])?, (v + &found[2])?],
                None => found,
            });
        }
        match sums {
            Some(sums) => Ok(sums),
            None => {
                let [q, k, v] = qkv.each_ref().map(Tensor::zeros_like);
                Ok([q?, k?, v?])
            }
        }
    }

    /// Attends within one group of segments with the heads of `q`; returns
    /// `[tokens, heads * head_dim]`.
    fn attend(
        group: &SegmentGroup,
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
    ) -> candle_core::Result<Tensor> {
        let (heads, kv_heads, dim) = (q.dim(1)?, k.dim(1)?, q.dim(2)?);
        let (s, t, seen) = (group.segments, group.queries, group.keys);
        let pad = |x: &Tensor, places: &Tensor, length, heads| {
            x.index_select(places, 0)?
                .reshape((s, length, heads, dim))?
                .transpose(1, 2)?
                .contiguous()
        };
        let share = heads / kv_heads;
        let q = pad(q, &group.gather_queries, t, heads)?;
        let q = q.reshape((s * kv_heads, share * t, dim))?;
        let k = pad(k, &group.gather_keys, seen, kv_heads)?.reshape((s * kv_heads, seen, dim))?;
        let v = pad(v, &group.gather_keys, seen, kv_heads)?.reshape((s * kv_heads, seen, dim))?;
        let scores = (q.matmul(&k.transpose(1, 2)?.contiguous()?)? * (1.0 / (dim as f64).sqrt()))?;
        let probabilities = masked_softmax(&scores.reshape((s, heads, t, seen))?, &group.mask)?;
        let attended = probabilities
            .reshape((s * kv_heads, share * t, seen))?
            .matmul(&v)?;
        attended
            .reshape((s, heads, t, dim))?
            .transpose(1, 2)?
            .contiguous()?
            .reshape((s * t, heads * dim))?
            .index_select(&group.scatter, 0)
    }
}

/// Returns the embeddings of a batch's tokens, `[n, hidden]`.
pub(super) fn embed(
    decoder: &Decoder,
    batch: &PackedBatch,
    adapters: Adapters,
) -> Result<Tensor, ModelError> {
    let tokens = Tensor::new(batch.tokens(), decoder.device())?;
    let table = decoder.embedding(adapters).tensor();
    Ok(table.index_select(&tokens, 0)?.to_dtype(decoder.dtype())?)
}

/// Returns a linear layer's output, adapters included.
pub(super) fn apply(
    linear: &Linear,
    adapters: &RowAdapters,
    x: &Tensor,
) -> candle_core::Result<Tensor> {
    let x = x.contiguous()?;
    let weight = linear.weight.tensor();
    let y = if linear.weight.slot().is_some() {
        x.matmul(&weight.t()?)?
    } else {
        x.apply_op1(FrozenLinear {
            weight: weight.clone(),
        })?
    };
    let y = match &linear.bias {
        Some(bias) => y.broadcast_add(bias.tensor())?,
        None => y,
    };
    if let Some(lora) = &linear.lora
        && adapters.own == Adapters::On
    {
        let x = match &adapters.dropout {
            Some(dropout) => {
                let width = linear.inputs;
                (&x * dropout.factors(lora.module(), width, x.dtype(), x.device())?)?
            }
            None => x,
        };
        return y + update(lora, &x)?;
    }
    // Rows without an adapter are taken as they are.
    let mut parts = Vec::new();
    let mut done = 0;
    for (rows, lora) in adapters.updates(linear) {
        let (start, length) = (rows.start, rows.len());
        parts.push(y.narrow(0, done, start - done)?);
        let x = x.narrow(0, start, length)?.contiguous()?;
        parts.push((y.narrow(0, start, length)? + update(lora, &x)?)?);
        done = rows.end;
    }
    if parts.is_empty() {
        return Ok(y);
    }
    parts.push(y.narrow(0, done, y.dim(0)? - done)?);
    Tensor::cat(&parts, 0)
}

/// Returns an adapter's update `scale * (x A^T) B^T` in the type of `x`.
fn update(lora: &Lora, x: &Tensor) -> candle_core::Result<Tensor> {
    let (a, b) = (lora.a.tensor(), lora.b.tensor());
    let low = x.to_dtype(a.dtype())?.matmul(&a.t()?)?;
    (low.matmul(&b.t()?)? * lora.scale)?.to_dtype(x.dtype())
}

/// Softmax over the last dimension in `f32` at least, with a backward pass.
fn masked_softmax(scores: &Tensor, mask: &Tensor) -> candle_core::Result<Tensor> {
    let dtype = scores.dtype();
    let scores = scores.to_dtype(mask.dtype())?.broadcast_add(mask)?;
    // Not `softmax_last_dim`, which has no backward pass.
    candle_nn::ops::softmax(&scores, D::Minus1)?.to_dtype(dtype)
}

fn segment_groups(decoder: &Decoder, batch: &PackedBatch) -> Result<Vec<SegmentGroup>, ModelError> {
    let heads = decoder.config().num_attention_heads;
    let segments: Vec<Segment<'_>> = (batch.segments().iter().zip(batch.histories()))
        .filter(|(own, _)| !own.is_empty())
        .map(|(own, history)| Segment { own, history })
        .collect();
    let mut groups = Vec::new();
    let mut start = 0;
    while start < segments.len() {
        let (mut end, mut queries, mut keys) = (start, 0, 0);
        while end < segments.len() {
            let wider = queries.max(segments[end].own.len());
            let longer = keys.max(segments[end].keys());
            if end > start && (end + 1 - start) * heads * wider * longer > MAX_SCORES {
                break;
            }
            (queries, keys) = (wider, longer);
            end += 1;
        }
        groups.push(segment_group(
            decoder,
            &segments[start..end],
            queries,
            keys,
        )?);
        start = end;
    }
    Ok(groups)
}

/// A segment and the ranges that it sees before its own.
struct Segment<'a> {
    own: &'a Range<usize>,
    history: &'a [Range<usize>],
}

impl Segment<'_> {
    fn keys(&self) -> usize {
        self.history.iter().chain([self.own]).map(Range::len).sum()
    }
}

fn segment_group(
    decoder: &Decoder,
    segments: &[Segment<'_>],
    queries: usize,
    keys: usize,
) -> Result<SegmentGroup, ModelError> {
    let index = |value: usize| u32::try_from(value).expect("a batch has fewer than 2^32 tokens");
    let (mut gather_queries, mut gather_keys) = (Vec::new(), Vec::new());
    let (mut scatter, mut mask) = (Vec::new(), Vec::new());
    for (row, segment) in segments.iter().enumerate() {
        let length = segment.own.len();
        let first_key = segment.keys() - length;
        scatter.extend((0..length).map(|place| index(row * queries + place)));
        gather_queries.extend(segment.own.clone().map(index));
        gather_queries.resize((row + 1) * queries, index(segment.own.start));
        gather_keys.extend(segment.history.iter().cloned().flatten().map(index));
        gather_keys.extend(segment.own.clone().map(index));
        gather_keys.resize((row + 1) * keys, index(segment.own.start));
        for query in 0..queries {
            // A padded query sees what the last one does, so that no row is without a key.
            let last = first_key + query.min(length - 1);
            mask.extend((0..keys).map(|key| if key <= last { 0.0 } else { f64::NEG_INFINITY }));
        }
    }
    let wide = if decoder.dtype() == DType::F64 {
        DType::F64
    } else {
        DType::F32
    };
    let shape = (segments.len(), 1, queries, keys);
    let mask = Tensor::from_vec(mask, shape, &Device::Cpu)?.to_dtype(wide)?;
    let device = decoder.device();
    Ok(SegmentGroup {
        segments: segments.len(),
        queries,
        keys,
        gather_queries: Tensor::new(gather_queries, device)?,
        gather_keys: Tensor::new(gather_keys, device)?,
        scatter: Tensor::new(scatter, device)?,
        mask: mask.to_device(device)?,
    })
}

/// What a forward pass keeps: each layer's input, and that of the final norm.
pub(super) struct ComposedTape {
    inputs: Vec<Tensor>,
    dropout: Option<RowDropout>,
}

/// Returns the hidden states `[n, hidden]` and the tape of their backward pass.
pub(super) fn forward(
    decoder: &Decoder,
    batch: &PackedBatch,
    adapters: Adapters,
    dropout: Option<RowDropout>,
) -> Result<(Tensor, ComposedTape), ModelError> {
    let pass = Pass::new(decoder, batch, adapters)?.dropping(dropout);
    let mut inputs = vec![pass.embed()?.detach()];
    for (index, layer) in decoder.layers().iter().enumerate() {
        let output = pass.layer(layer, &inputs[index])?;
        inputs.push(output);
    }
    let hidden = pass
        .norm(&inputs[inputs.len() - 1], decoder.norm())?
        .detach();
    let dropout = pass.adapters.dropout;
    Ok((hidden, ComposedTape { inputs, dropout }))
}

/// Adds the gradients of all variables below the hidden states.
pub(super) fn backward(
    decoder: &Decoder,
    batch: &PackedBatch,
    mut tape: ComposedTape,
    dhidden: &Tensor,
    gradients: &mut Gradients,
) -> Result<(), ModelError> {
    let pass = Pass::new(decoder, batch, Adapters::On)?.dropping(tape.dropout);
    let last = tape
        .inputs
        .pop()
        .expect("one input for each layer and one for the norm");
    let norm = [decoder.norm()];
    let [mut dx] = chain([&last], [dhidden], &norm, gradients, |[x]| {
        Ok([pass.norm(x, decoder.norm())?])
    })?;
    for layer in decoder.layers().iter().rev() {
        let input = tape.inputs.pop().expect("one input for each layer");
        dx = pass.layer_backward(layer, &input, &dx, gradients)?;
    }
    let embedding = decoder.embedding(Adapters::On);
    if let Some(slot) = embedding.slot() {
        let embedding = embedding.tensor();
        let tokens = Tensor::new(batch.tokens(), decoder.device())?;
        let sum =
            embedding
                .zeros_like()?
                .index_add(&tokens, &dx.to_dtype(embedding.dtype())?, 0)?;
        gradients.add_tensor(slot, &sum)?;
    }
    Ok(())
}

/// Returns the gradients of the inputs through `f`, given those of its outputs, and adds those of the
/// parameters.
fn chain<const N: usize, const M: usize>(
    inputs: [&Tensor; N],
    doutputs: [&Tensor; M],
    parameters: &[&Parameter],
    gradients: &mut Gradients,
    f: impl FnOnce([&Tensor; N]) -> candle_core::Result<[Tensor; M]>,
) -> Result<[Tensor; N], ModelError> {
    let mut variables = Vec::with_capacity(N);
    for input in inputs {
        variables.push(Var::from_tensor(input)?);
    }
    let outputs = f(std::array::from_fn(|index| variables[index].as_tensor()))?;
    let mut sum: Option<Tensor> = None;
    for (output, doutput) in outputs.into_iter().zip(doutputs) {
        let term = (output * doutput)?.sum_all()?;
        sum = Some(match sum {
            Some(sum) => (sum + term)?,
            None => term,
        });
    }
    let store = sum.expect("a function has outputs").backward()?;
    for parameter in parameters {
        if let Some(slot) = parameter.slot() {
            let gradient = store.get(parameter.tensor());
            let missing = || ModelError::MissingTensor {
                name: parameter.name().to_owned(),
            };
            gradients.add_tensor(slot, gradient.ok_or_else(missing)?)?;
        }
    }
    let mut dinputs = Vec::with_capacity(N);
    for variable in &variables {
        let missing = || ModelError::MissingTensor {
            name: "gradient of a layer's input".to_owned(),
        };
        let dinput = store.get(variable.as_tensor()).ok_or_else(missing)?;
        dinputs.push(dinput.detach());
    }
    Ok(dinputs.try_into().expect("as many as inputs"))
}
