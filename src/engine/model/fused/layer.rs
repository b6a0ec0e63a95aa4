//! One decoder layer: forward, backward, and forward with a cache.

use super::super::decoder::Layer;
use super::super::gradients::Gradients;
use super::super::linear::{Linear, Parameter};
use super::super::ops::{
    Attention, Buffer, HeadShape, LastTokens, PackedKeyValues, Real, RowPairs, Turn, Values, Write,
    attend, attend_backward, rms_norm, rms_norm_backward, rms_norm_row, rope, swiglu,
    swiglu_backward, swiglu_backward_to, swiglu_in_place,
};
use super::super::{Adapters, ModelError};
use super::linear::{Input, Returning, Rows};
use super::{FusedReal, Pass, linear};
use crate::engine::kv_cache::CachedRows;

/// Rows of tokens that go through the feed-forward layer together if nothing of it is kept.
const FEED_FORWARD_ROWS: usize = 480;

/// What a layer's forward pass keeps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Keep {
    /// Nothing: there will be no backward pass.
    Nothing,
    /// The input: the backward pass runs the layer again.
    Input,
    /// All that the backward pass reads.
    All,
}

/// The input of a layer, and what it made of it unless that is to be recomputed.
pub(super) struct LayerTape<T: Real> {
    input: Vec<T>,
    activations: Option<Activations<T>>,
}

/// Intermediate results, `[n, width]` each.
struct Activations<T: Real> {
    attention: AttentionActivations<T>,
    /// Residual stream between attention and feed-forward.
    middle: Vec<T>,
    feed_forward: FeedForwardActivations<T>,
}

struct AttentionActivations<T: Real> {
    normed: Input<T>,
    projected: Projected<T>,
    /// Queries and keys before their norm, if they have one.
    unnormed: Unnormed<T>,
    attended: Input<T>,
    log_sum_exp: Vec<T>,
    output_low: Option<Buffer<T>>,
}

/// Queries, keys and values as attention reads them, and each adapter's low-rank product.
struct Projected<T: Real> {
    queries: Buffer<T>,
    keys: Buffer<T>,
    values: Buffer<T>,
    low: [Option<Buffer<T>>; 3],
}

struct FeedForwardActivations<T: Real> {
    normed: Input<T>,
    gate: Buffer<T>,
    up: Buffer<T>,
    product: Input<T>,
    low: [Option<Buffer<T>>; 3],
}

/// Runs the layer on `input` `[n, hidden]`.
pub(super) fn forward<T: FusedReal>(
    pass: &Pass<'_, T>,
    layer: &Layer,
    input: Vec<T>,
    keep: Keep,
) -> Result<(Vec<T>, Option<LayerTape<T>>), ModelError> {
    let shape = pass.decoder.head_shape();
    let segments = pass.batch.segments();
    let normed = normed_input(pass, &input, &layer.input_norm, &layer.q_proj)?;
    let (projected, unnormed) = project(pass, layer, normed.rows(), keep == Keep::All)?;
    let source = PackedKeyValues {
        keys: &projected.keys,
        values: &projected.values,
        segments,
        histories: pass.batch.histories(),
        shape,
    };
    let Attention {
        output,
        log_sum_exp,
    } = attend(&projected.queries, segments, shape, &source);
    let attended = Input::of(&layer.o_proj, output, pass.batch.len())?;
    let mut middle = input.clone();
    let output_low = add_attention_output(pass, layer, attended.rows(), &mut middle)?;
    if keep != Keep::All {
        add_feed_forward(pass, layer, &mut middle)?;
        let tape = (keep == Keep::Input).then_some(LayerTape {
            input,
            activations: None,
        });
        return Ok((middle, tape));
    }
    let (output, feed_forward) = feed_forward(pass, layer, &middle)?;
    let attention = AttentionActivations {
        normed,
        projected,
        unnormed,
        attended,
        log_sum_exp,
        output_low,
    };
    let activations = Some(Activations {
        attention,
        middle,
        feed_forward,
    });
    Ok((output, Some(LayerTape { input, activations })))
}

/// Runs the layer on new tokens `x` in place and appends their keys and values to `cached`.
pub(super) fn forward_cached<T: FusedReal>(
    pass: &Pass<'_, T>,
    layer: &Layer,
    index: usize,
    x: &mut [T],
    cached: &mut CachedRows<T>,
) -> Result<(), ModelError> {
    let segments = pass.batch.segments();
    let normed = normed_input(pass, x, &layer.input_norm, &layer.q_proj)?;
    let (projected, _) = project(pass, layer, normed.rows(), false)?;
    cached.write(index, segments, &projected.keys, &projected.values);
    let attended = attend(
        &projected.queries,
        segments,
        pass.decoder.head_shape(),
        cached,
    );
    add_attention_output(pass, layer, Rows::Wide(&attended.output), x)?;
    add_feed_forward(pass, layer, x)
}

/// Runs the model's last layer on new tokens `x`: appends the keys and values of all to `cached`, and
/// returns the output of the last tokens of `segments`, which are those of `tails`.
pub(super) fn forward_cached_tails<T: FusedReal>(
    pass: &Pass<'_, T>,
    tails: &Pass<'_, T>,
    segments: &[usize],
    layer: &Layer,
    index: usize,
    x: &[T],
    cached: &mut CachedRows<T>,
) -> Result<Vec<T>, ModelError> {
    let (shape, all) = (pass.decoder.head_shape(), pass.batch.segments());
    let width = layer.down_proj.outputs;
    let last = |x: &[T]| -> Vec<T> {
        let rows = segments.iter().map(|&segment| all[segment].end - 1);
        let rows = rows.map(|row| &x[row * width..][..width]);
        rows.flatten().copied().collect()
    };
    let normed = normalise(pass, x, layer.input_norm.tensor())?;
    let mut keys = Buffer::new(pass.batch.len() * layer.k_proj.outputs);
    let mut values = Buffer::new(pass.batch.len() * layer.v_proj.outputs);
    linear::forward(
        [&layer.k_proj, &layer.v_proj],
        Rows::Wide(&normed),
        pass.batch.len(),
        &pass.adapters,
        Write::Replace,
        [&mut keys, &mut values],
    )?;
    place(pass, layer.k_norm.as_ref(), shape.kv_heads, &mut keys)?;
    cached.write(index, all, &keys, &values);
    let mut queries = Buffer::new(tails.batch.len() * layer.q_proj.outputs);
    linear::forward(
        [&layer.q_proj],
        Rows::Wide(&last(&normed)),
        tails.batch.len(),
        &tails.adapters,
        Write::Replace,
        [&mut queries],
    )?;
    place(tails, layer.q_norm.as_ref(), shape.heads, &mut queries)?;
    let source = LastTokens {
        source: &*cached,
        all,
        segments,
    };
    let attended = attend(&queries, tails.batch.segments(), shape, &source);
    let mut x = last(x);
    add_attention_output(tails, layer, Rows::Wide(&attended.output), &mut x)?;
    add_feed_forward(tails, layer, &mut x)?;
    Ok(x)
}

fn normalise<T: FusedReal>(
    pass: &Pass<'_, T>,
    x: &[T],
    weight: &candle_core::Tensor,
) -> Result<Buffer<T>, ModelError> {
    let weight = Values::<T>::of(weight)?;
    let mut y = Buffer::new(x.len());
    rms_norm(x, &weight, pass.decoder.config().rms_norm_eps, &mut y);
    Ok(y)
}

/// Returns the normed rows as `linear` and its neighbours read them.
fn normed_input<T: FusedReal>(
    pass: &Pass<'_, T>,
    x: &[T],
    norm: &Parameter,
    linear: &Linear,
) -> Result<Input<T>, ModelError> {
    let weight = Values::<T>::of(norm.tensor())?;
    let (weight, width) = (&*weight, linear.inputs);
    let eps = T::from_f64(pass.decoder.config().rms_norm_eps);
    Input::with(
        linear,
        x.len() / width,
        #[inline(always)]
        |row, y| rms_norm_row(&x[row * width..][..width], weight, eps, y),
    )
}

type Unnormed<T> = Option<(Buffer<T>, Buffer<T>)>;

fn project<T: FusedReal>(
    pass: &Pass<'_, T>,
    layer: &Layer,
    normed: Rows<'_, T>,
    keep: bool,
) -> Result<(Projected<T>, Unnormed<T>), ModelError> {
    let HeadShape {
        heads, kv_heads, ..
    } = pass.decoder.head_shape();
    let rows = pass.batch.len();
    let outputs = |linear: &Linear| Buffer::new(rows * linear.outputs);
    let mut queries = outputs(&layer.q_proj);
    let mut keys = outputs(&layer.k_proj);
    let mut values = outputs(&layer.v_proj);
    let low = linear::forward(
        [&layer.q_proj, &layer.k_proj, &layer.v_proj],
        normed,
        rows,
        &pass.adapters,
        Write::Replace,
        [&mut queries, &mut keys, &mut values],
    )?;
    let unnormed_queries = place(pass, layer.q_norm.as_ref(), heads, &mut queries)?;
    let unnormed_keys = place(pass, layer.k_norm.as_ref(), kv_heads, &mut keys)?;
    let unnormed = unnormed_queries.zip(unnormed_keys).filter(|_| keep);
    Ok((
        Projected {
            queries,
            keys,
            values,
            low,
        },
        unnormed,
    ))
}

/// Norms queries or keys, if the model does, and turns them to their positions. Returns what was normed.
fn place<T: FusedReal>(
    pass: &Pass<'_, T>,
    norm: Option<&Parameter>,
    heads: usize,
    x: &mut Buffer<T>,
) -> Result<Option<Buffer<T>>, ModelError> {
    let unnormed = match norm {
        Some(norm) => {
            let normed = normalise(pass, x, norm.tensor())?;
            Some(std::mem::replace(x, normed))
        }
        None => None,
    };
    let head_dim = pass.decoder.head_shape().head_dim;
    let positions = pass.batch.positions();
    rope(x, positions, heads, &pass.rope, head_dim, Turn::Forward);
    Ok(unnormed)
}

/// Adds the attention's output to the residual stream `x`.
fn add_attention_output<T: FusedReal>(
    pass: &Pass<'_, T>,
    layer: &Layer,
    attended: Rows<'_, T>,
    x: &mut [T],
) -> Result<Option<Buffer<T>>, ModelError> {
    let [low] = linear::forward(
        [&layer.o_proj],
        attended,
        pass.batch.len(),
        &pass.adapters,
        Write::Add,
        [x],
    )?;
    Ok(low)
}

/// Adds the feed-forward layer's output to the residual stream `x`, some rows at a time: what lies
/// between stays in the cache.
fn add_feed_forward<T: FusedReal>(
    pass: &Pass<'_, T>,
    layer: &Layer,
    x: &mut [T],
) -> Result<(), ModelError> {
    let (width, inner) = (layer.down_proj.outputs, layer.gate_proj.outputs);
    let most = FEED_FORWARD_ROWS.min(x.len() / width);
    let mut gate = Buffer::new(most * inner);
    let mut up = Buffer::new(most * inner);
    for (index, x) in x.chunks_mut(FEED_FORWARD_ROWS * width).enumerate() {
        let (first, rows) = (index * FEED_FORWARD_ROWS, x.len() / width);
        let adapters = pass.adapters.part(first..first + rows);
        let normed = normed_input(pass, x, &layer.post_norm, &layer.gate_proj)?;
        let (gate, up) = (&mut gate[..rows * inner], &mut up[..rows * inner]);
        linear::forward(
            [&layer.gate_proj, &layer.up_proj],
            normed.rows(),
            rows,
            &adapters,
            Write::Replace,
            [gate, up],
        )?;
        let pairs;
        let product = if linear::takes_pairs::<T>(&layer.down_proj)? {
            pairs = gated(layer, gate, up, rows)?;
            pairs.rows()
        } else {
            swiglu_in_place(gate, up);
            Rows::Wide(gate)
        };
        linear::forward(
            [&layer.down_proj],
            product,
            rows,
            &adapters,
            Write::Add,
            [x],
        )?;
    }
    Ok(())
}

/// Returns the product of the feed-forward layer's halves, as its last weights read it.
fn gated<T: FusedReal>(
    layer: &Layer,
    gate: &[T],
    up: &[T],
    rows: usize,
) -> Result<Input<T>, ModelError> {
    let inner = layer.gate_proj.outputs;
    Input::with(
        &layer.down_proj,
        rows,
        #[inline(always)]
        |row, y| {
            let part = row * inner..(row + 1) * inner;
            swiglu(&gate[part.clone()], &up[part], y);
        },
    )
}

/// Returns the residual stream behind the feed-forward layer, and what its backward pass reads.
fn feed_forward<T: FusedReal>(
    pass: &Pass<'_, T>,
    layer: &Layer,
    middle: &[T],
) -> Result<(Vec<T>, FeedForwardActivations<T>), ModelError> {
    let rows = pass.batch.len();
    let adapters = &pass.adapters;
    let inner = layer.gate_proj.outputs;
    let normed = normed_input(pass, middle, &layer.post_norm, &layer.gate_proj)?;
    let mut gate = Buffer::new(rows * inner);
    let mut up = Buffer::new(rows * inner);
    let [gate_low, up_low] = linear::forward(
        [&layer.gate_proj, &layer.up_proj],
        normed.rows(),
        rows,
        adapters,
        Write::Replace,
        [&mut gate, &mut up],
    )?;
    let product = gated(layer, &gate, &up, rows)?;
    let mut output = middle.to_vec();
    let [down_low] = linear::forward(
        [&layer.down_proj],
        product.rows(),
        rows,
        adapters,
        Write::Add,
        [&mut output],
    )?;
    let low = [gate_low, up_low, down_low];
    Ok((
        output,
        FeedForwardActivations {
            normed,
            gate,
            up,
            product,
            low,
        },
    ))
}

/// Returns the gradient of the layer's input, given that of its output.
pub(super) fn backward<T: FusedReal>(
    pass: &Pass<'_, T>,
    layer: &Layer,
    tape: LayerTape<T>,
    doutput: Vec<T>,
    gradients: &mut Gradients,
) -> Result<Vec<T>, ModelError> {
    let (input, activations) = match tape.activations {
        Some(activations) => (tape.input, activations),
        None => {
            debug_assert_eq!(
                pass.adapters.own,
                Adapters::On,
                "training runs with adapters"
            );
            let (_, tape) = forward(pass, layer, tape.input, Keep::All)?;
            let tape = tape.expect("asked for");
            (tape.input, tape.activations.expect("asked for"))
        }
    };
    let Activations {
        attention,
        middle,
        feed_forward,
    } = activations;
    let dmiddle = feed_forward_backward(pass, layer, &middle, feed_forward, doutput, gradients)?;
    attention_backward(pass, layer, &input, attention, dmiddle, gradients)
}

fn feed_forward_backward<T: FusedReal>(
    pass: &Pass<'_, T>,
    layer: &Layer,
    middle: &[T],
    saved: FeedForwardActivations<T>,
    mut doutput: Vec<T>,
    gradients: &mut Gradients,
) -> Result<Vec<T>, ModelError> {
    let rows = pass.batch.len();
    let FeedForwardActivations {
        normed,
        mut gate,
        mut up,
        product,
        low,
    } = saved;
    let [gate_low, up_low, down_low] = &low;
    let mut dproduct = Buffer::new(rows * layer.down_proj.inputs);
    let dy = linear::in_pairs(&layer.down_proj, &doutput, rows)?;
    let down = Returning {
        linear: &layer.down_proj,
        low: down_low.as_deref(),
        dy: Rows::of(&doutput, dy.as_ref()),
    };
    linear::backward(
        [down],
        product.rows(),
        rows,
        &pass.adapters,
        &mut dproduct,
        gradients,
    )?;
    let in_pairs = match normed {
        Input::Wide(_) => {
            swiglu_backward(&mut gate, &mut up, &dproduct);
            None
        }
        Input::Pairs(_) => Some(gate_gradients(&gate, &up, &dproduct, rows)),
    };
    let [dgate, dup] = match &in_pairs {
        Some([dgate, dup]) => [Rows::Pairs(dgate), Rows::Pairs(dup)],
        None => [Rows::Wide(&gate), Rows::Wide(&up)],
    };
    let mut dnormed = Buffer::new(rows * layer.gate_proj.inputs);
    let both = [
        (&layer.gate_proj, gate_low, dgate),
        (&layer.up_proj, up_low, dup),
    ];
    let both = both.map(|(linear, low, dy)| Returning {
        linear,
        low: low.as_deref(),
        dy,
    });
    linear::backward(
        both,
        normed.rows(),
        rows,
        &pass.adapters,
        &mut dnormed,
        gradients,
    )?;
    norm_backward(
        pass,
        &layer.post_norm,
        middle,
        &dnormed,
        &mut doutput,
        gradients,
    )?;
    Ok(doutput)
}

/// Returns the gradients of the feed-forward layer's halves as products read them.
fn gate_gradients<T: Real>(gate: &[T], up: &[T], dproduct: &[T], rows: usize) -> [RowPairs; 2] {
    let inner = gate.len() / rows.max(1);
    RowPairs::two_with(
        rows,
        inner,
        #[inline(always)]
        |row, dgate, dup| {
            let [gate, up, dy] = [gate, up, dproduct].map(|x| &x[row * inner..(row + 1) * inner]);
            swiglu_backward_to([gate, up], dy, [dgate, dup]);
        },
    )
}

fn attention_backward<T: FusedReal>(
    pass: &Pass<'_, T>,
    layer: &Layer,
    input: &[T],
    saved: AttentionActivations<T>,
    mut dmiddle: Vec<T>,
    gradients: &mut Gradients,
) -> Result<Vec<T>, ModelError> {
    let rows = pass.batch.len();
    let shape = pass.decoder.head_shape();
    let positions = pass.batch.positions();
    let AttentionActivations {
        normed,
        projected,
        unnormed,
        attended,
        log_sum_exp,
        output_low,
    } = saved;
    let mut dattended = Buffer::new(rows * layer.o_proj.inputs);
    let dy = linear::in_pairs(&layer.o_proj, &dmiddle, rows)?;
    let out = Returning {
        linear: &layer.o_proj,
        low: output_low.as_deref(),
        dy: Rows::of(&dmiddle, dy.as_ref()),
    };
    linear::backward(
        [out],
        attended.rows(),
        rows,
        &pass.adapters,
        &mut dattended,
        gradients,
    )?;
    drop((attended, dy));
    let source = PackedKeyValues {
        keys: &projected.keys,
        values: &projected.values,
        segments: pass.batch.segments(),
        histories: pass.batch.histories(),
        shape,
    };
    let mut d = attend_backward(&projected.queries, &source, &log_sum_exp, &dattended);
    drop(dattended);
    rope(
        &mut d.queries,
        positions,
        shape.heads,
        &pass.rope,
        shape.head_dim,
        Turn::Backward,
    );
    rope(
        &mut d.keys,
        positions,
        shape.kv_heads,
        &pass.rope,
        shape.head_dim,
        Turn::Backward,
    );
    if let (Some(q_norm), Some(k_norm), Some((queries, keys))) =
        (&layer.q_norm, &layer.k_norm, &unnormed)
    {
        for (norm, x, dy) in [
            (q_norm, queries, &mut d.queries),
            (k_norm, keys, &mut d.keys),
        ] {
            let mut dx = Buffer::new(x.len());
            dx.fill(T::ZERO);
            norm_backward(pass, norm, x, dy, &mut dx, gradients)?;
            *dy = dx;
        }
    }
    let mut dnormed = Buffer::new(rows * layer.q_proj.inputs);
    let linears = [&layer.q_proj, &layer.k_proj, &layer.v_proj];
    let [query_low, key_low, value_low] = &projected.low;
    let lows = [query_low, key_low, value_low];
    let dys: [&[T]; 3] = [&d.queries, &d.keys, &d.values];
    let mut in_pairs = [const { None }; 3];
    for ((linear, dy), pairs) in linears.iter().zip(dys).zip(&mut in_pairs) {
        *pairs = linear::in_pairs(linear, dy, rows)?;
    }
    let three = std::array::from_fn(|at| Returning {
        linear: linears[at],
        low: lows[at].as_deref(),
        dy: Rows::of(dys[at], in_pairs[at].as_ref()),
    });
    linear::backward::<T, 3>(
        three,
        normed.rows(),
        rows,
        &pass.adapters,
        &mut dnormed,
        gradients,
    )?;
    norm_backward(
        pass,
        &layer.input_norm,
        input,
        &dnormed,
        &mut dmiddle,
        gradients,
    )?;
    Ok(dmiddle)
}

/// Adds a norm's gradient with respect to its input to `dx`.
fn norm_backward<T: FusedReal>(
    pass: &Pass<'_, T>,
    norm: &Parameter,
    x: &[T],
    dy: &[T],
    dx: &mut [T],
    gradients: &mut Gradients,
) -> Result<(), ModelError> {
    let eps = pass.decoder.config().rms_norm_eps;
    let weight = Values::<T>::of(norm.tensor())?;
    let dweight = norm.slot().map(|slot| T::sums(gradients, slot));
    rms_norm_backward(x, &weight, eps, dy, dx, dweight);
    Ok(())
}
