//! Linear layers with an optional adapter, forward and backward.
//!
//! Where weights are multiplied in pairs of bf16, so are the adapter's matrices, and rows are rounded once
//! for all that read them: the products, and later the gradients of the adapter.

use std::sync::Arc;

use super::super::Adapters;
use super::super::ModelError;
use super::super::adapters::RowAdapters;
use super::super::gradients::{GradientReal, Gradients};
use super::super::linear::{Linear, Lora, Parameter};
use super::super::ops::{
    self, Buffer, Matrix, Orientation, PackedRows, PairProduct, Panels, Product, Real, RowPairs,
    Term, Values, Write, matmul,
};
use super::dropout;

/// Rows that meet weights.
#[derive(Clone, Copy)]
pub(super) enum Rows<'a, T: Real> {
    Wide(&'a [T]),
    /// Rounded, for weights that take pairs.
    Pairs(&'a RowPairs),
}

impl<'a, T: Real> Rows<'a, T> {
    /// Returns `x`, or what was rounded of it.
    pub(super) fn of(x: &'a [T], pairs: Option<&'a RowPairs>) -> Self {
        pairs.map_or(Self::Wide(x), Self::Pairs)
    }
}

/// Rows that are kept for what reads them, in the form that it reads.
pub(super) enum Input<T: Real> {
    Wide(Buffer<T>),
    Pairs(RowPairs),
}

impl<T: Real> Input<T> {
    /// Returns rows of `linear`'s inputs that `fill` writes, given their index.
    pub(super) fn with(
        linear: &Linear,
        rows: usize,
        fill: impl Fn(usize, &mut [T]) + Sync,
    ) -> Result<Self, ModelError> {
        if takes_pairs::<T>(linear)? {
            return Ok(Self::Pairs(RowPairs::with(rows, linear.inputs, fill)));
        }
        let mut values = Buffer::new(rows * linear.inputs);
        ops::for_each_row(&mut values, linear.inputs, fill);
        Ok(Self::Wide(values))
    }

    /// Returns `x` as `linear` reads it.
    pub(super) fn of(linear: &Linear, x: Buffer<T>, rows: usize) -> Result<Self, ModelError> {
        Ok(match in_pairs(linear, &x, rows)? {
            Some(pairs) => Self::Pairs(pairs),
            None => Self::Wide(x),
        })
    }

    pub(super) fn rows(&self) -> Rows<'_, T> {
        match self {
            Self::Wide(x) => Rows::Wide(x),
            Self::Pairs(pairs) => Rows::Pairs(pairs),
        }
    }
}

/// Returns whether a layer's weights take pairs.
pub(super) fn takes_pairs<T: Real>(linear: &Linear) -> Result<bool, ModelError> {
    Ok(linear.weight.panels::<T>()?.takes_pairs())
}

/// Rounds rows of a layer's inputs if its weights take pairs.
pub(super) fn in_pairs<T: Real>(
    linear: &Linear,
    x: &[T],
    rows: usize,
) -> Result<Option<RowPairs>, ModelError> {
    let width = x.len() / rows.max(1);
    Ok(takes_pairs::<T>(linear)?.then(|| RowPairs::new(x, rows, 0..width, width)))
}

/// Writes or adds `x W^T + b + scale * (x A^T) B^T` to `y` for each layer and its `y`, and returns each
/// one's `x A^T` if the model has an adapter of its own there.
pub(super) fn forward<T: Real, const N: usize>(
    linears: [&Linear; N],
    x: Rows<'_, T>,
    rows: usize,
    adapters: &RowAdapters,
    write: Write,
    y: [&mut [T]; N],
) -> Result<[Option<Buffer<T>>; N], ModelError> {
    match x {
        Rows::Pairs(pairs) => forward_in_pairs(linears, pairs, adapters, write, y),
        Rows::Wide(x) => match in_pairs(linears[0], x, rows)? {
            Some(pairs) => forward_in_pairs(linears, &pairs, adapters, write, y),
            None => forward_wide(linears, x, rows, adapters, write, y),
        },
    }
}

fn forward_wide<T: Real, const N: usize>(
    linears: [&Linear; N],
    x: &[T],
    rows: usize,
    adapters: &RowAdapters,
    write: Write,
    mut y: [&mut [T]; N],
) -> Result<[Option<Buffer<T>>; N], ModelError> {
    if let (Adapters::On, Some(dropout)) = (adapters.own, &adapters.dropout) {
        return dropout::forward(linears, x, rows, dropout, write, y);
    }
    let mut low = [const { None }; N];
    let mut weights = Vec::with_capacity(N);
    for (linear, low) in linears.iter().zip(&mut low) {
        let mut a = None;
        if let (Some(lora), Adapters::On) = (&linear.lora, adapters.own) {
            *low = Some(Buffer::new(rows * lora.rank));
            a = Some(lora.a.panels::<T>()?);
        }
        weights.push((linear.weight.panels::<T>()?, a));
    }
    let mut products = Vec::with_capacity(2 * N);
    for (((weight, a), y), low) in weights.iter().zip(&mut y).zip(&mut low) {
        products.push(Product { weight, write, y });
        if let (Some(weight), Some(y)) = (a, low) {
            let write = Write::Replace;
            products.push(Product { weight, write, y });
        }
    }
    ops::linears(T::ONE, x, rows, products);
    for ((linear, low), y) in linears.iter().zip(&low).zip(y) {
        add_bias(linear, y)?;
        for (rows, lora) in adapters.updates(linear) {
            let x = &x[rows.start * linear.inputs..rows.end * linear.inputs];
            let y = &mut y[rows.start * linear.outputs..rows.end * linear.outputs];
            let mut low = Buffer::new(rows.len() * lora.rank);
            let a = lora.a.panels::<T>()?;
            ops::linear(T::ONE, x, rows.len(), &a, Write::Replace, &mut low);
            add_update(lora, &low, rows.len(), y)?;
        }
        if let (Some(lora), Some(low)) = (&linear.lora, low) {
            add_update(lora, low, rows, y)?;
        }
    }
    Ok(low)
}

/// Adds `scale * low B^T` to `y`.
pub(super) fn add_update<T: Real>(
    lora: &Lora,
    low: &[T],
    rows: usize,
    y: &mut [T],
) -> Result<(), ModelError> {
    let b = lora.b.panels::<T>()?;
    ops::linear(T::from_f64(lora.scale), low, rows, &b, Write::Add, y);
    Ok(())
}

fn add_bias<T: Real>(linear: &Linear, y: &mut [T]) -> Result<(), ModelError> {
    if let Some(bias) = &linear.bias {
        let bias = Values::<T>::of(bias.tensor())?;
        for y in y.chunks_exact_mut(linear.outputs) {
            y.iter_mut().zip(bias.iter()).for_each(|(y, &b)| *y += b);
        }
    }
    Ok(())
}

/// An adapter's low-rank rows: as they are, and as its second matrix reads them.
struct Update<T: Real> {
    low: Buffer<T>,
    scaled: RowPairs,
    b: Arc<Panels<T>>,
}

impl<T: Real> Update<T> {
    /// Returns the update of rows `x` by each adapter.
    fn of_each(x: &RowPairs, loras: &[&Lora]) -> Result<Vec<Self>, ModelError> {
        let first: Vec<_> = (loras.iter())
            .map(|lora| Ok((lora.a.panels::<T>()?, Buffer::new(x.rows() * lora.rank))))
            .collect::<Result<_, ModelError>>()?;
        let (a, mut low): (Vec<_>, Vec<Buffer<T>>) = first.into_iter().unzip();
        let products = a.iter().zip(&mut low).map(|(weight, y)| PairProduct {
            weight,
            write: Write::Replace,
            y,
            update: None,
        });
        ops::linears_of_pairs(T::ONE, x, products.collect());
        let updates = loras.iter().zip(low).map(|(lora, low)| {
            let scale = T::from_f64(lora.scale);
            let scaled = RowPairs::with(
                x.rows(),
                lora.rank,
                #[inline(always)]
                |row, scaled: &mut [T]| {
                    let low = &low[row * lora.rank..][..lora.rank];
                    scaled
                        .iter_mut()
                        .zip(low)
                        .for_each(|(scaled, &low)| *scaled = scale * low);
                },
            );
            let b = lora.b.panels::<T>()?;
            Ok(Self { low, scaled, b })
        });
        updates.collect()
    }
}

fn forward_in_pairs<T: Real, const N: usize>(
    linears: [&Linear; N],
    x: &RowPairs,
    adapters: &RowAdapters,
    write: Write,
    mut y: [&mut [T]; N],
) -> Result<[Option<Buffer<T>>; N], ModelError> {
    let own: Vec<&Lora> = match adapters.own {
        Adapters::On => linears
            .iter()
            .filter_map(|linear| linear.lora.as_ref())
            .collect(),
        Adapters::Off => Vec::new(),
    };
    let mut own = Update::<T>::of_each(x, &own)?.into_iter();
    let mut updates = [const { None }; N];
    for (linear, update) in linears.iter().zip(&mut updates) {
        if linear.lora.is_some() {
            *update = own.next();
        }
    }
    let weights: Vec<_> = (linears.iter())
        .map(|linear| linear.weight.panels::<T>())
        .collect::<Result<_, _>>()?;
    let products = weights.iter().zip(&mut y).zip(&updates);
    let products = products.map(|((weight, y), update)| PairProduct {
        weight,
        write,
        y,
        update: update.as_ref().map(|update| (&update.scaled, &*update.b)),
    });
    ops::linears_of_pairs(T::ONE, x, products.collect());
    for (linear, y) in linears.iter().zip(y) {
        for (rows, lora) in adapters.updates(linear) {
            let y = &mut y[rows.start * linear.outputs..rows.end * linear.outputs];
            for update in Update::of_each(&x.part(rows), &[lora])? {
                ops::add_to_rows(&update.scaled, &update.b, y);
            }
        }
        add_bias(linear, y)?;
    }
    Ok(updates.map(|update| update.map(|update| update.low)))
}

/// A layer on its way back.
#[derive(Clone, Copy)]
pub(super) struct Returning<'a, T: Real> {
    pub(super) linear: &'a Linear,
    /// What [`forward`] returned.
    pub(super) low: Option<&'a [T]>,
    /// The gradient of its output, `[rows, outputs]`.
    pub(super) dy: Rows<'a, T>,
}

/// Adds the gradients of the variables of layers that read the same `x`, and writes that of `x` to `dx`.
///
/// # Panics
///
/// Panics if `x` and the outputs' gradients are not all as the weights take them.
pub(super) fn backward<T: GradientReal, const N: usize>(
    layers: [Returning<'_, T>; N],
    x: Rows<'_, T>,
    rows: usize,
    adapters: &RowAdapters,
    dx: &mut [T],
    gradients: &mut Gradients,
) -> Result<(), ModelError> {
    match x {
        Rows::Wide(x) => backward_wide(layers, x, rows, adapters, dx, gradients),
        // Nothing is dropped of what is kept rounded.
        Rows::Pairs(x) => backward_in_pairs(layers, x, dx, gradients),
    }
}

fn backward_wide<T: GradientReal, const N: usize>(
    layers: [Returning<'_, T>; N],
    x: &[T],
    rows: usize,
    adapters: &RowAdapters,
    dx: &mut [T],
    gradients: &mut Gradients,
) -> Result<(), ModelError> {
    if let Some(dropout) = &adapters.dropout {
        return dropout::backward(layers, x, rows, dropout, dx, gradients);
    }
    let mut products = Vec::with_capacity(2 * N);
    for Returning { linear, low, dy } in layers {
        let Rows::Wide(dy) = dy else {
            panic!("gradients are rounded only where inputs are")
        };
        let (inputs, outputs) = (linear.inputs, linear.outputs);
        if let Some(slot) = linear.bias.as_ref().and_then(Parameter::slot) {
            let sums = T::sums(gradients, slot);
            for dy in dy.chunks_exact(outputs) {
                sums.iter_mut().zip(dy).for_each(|(sum, &dy)| *sum += dy);
            }
        }
        if let Some(slot) = linear.weight.slot() {
            let (dy, x) = (Matrix::new(dy, rows, outputs), Matrix::new(x, rows, inputs));
            let sums = T::sums(gradients, slot);
            matmul(T::ONE, dy.t(), x, Write::Add, sums, inputs, true);
        }
        let weight = linear.weight.panels::<T>()?;
        let packed = PackedRows::new(dy, rows, 0..outputs, outputs);
        if let (Some(lora), Some(low)) = (&linear.lora, low) {
            let scale = T::from_f64(lora.scale);
            let mut dlow = Buffer::new(rows * lora.rank);
            let b = lora.b.panels::<T>()?;
            let term = Term::new(scale, &packed, &b);
            ops::linears_backward(&[term], Write::Replace, &mut dlow);
            if let Some(slot) = lora.b.slot() {
                let sums = T::sums(gradients, slot);
                ops::add_outer_products(scale, low, dy, rows, Orientation::Turned, sums);
            }
            if let Some(slot) = lora.a.slot() {
                let sums = T::sums(gradients, slot);
                ops::add_outer_products(T::ONE, &dlow, x, rows, Orientation::Upright, sums);
            }
            let a = lora.a.panels::<T>()?;
            let dlow = PackedRows::new(&dlow, rows, 0..lora.rank, lora.rank);
            products.push((dlow, a));
        }
        products.push((packed, weight));
    }
    let terms: Vec<Term<'_, T>> = products
        .iter()
        .map(|(dy, weight)| Term::new(T::ONE, dy, weight))
        .collect();
    ops::linears_backward(&terms, Write::Replace, dx);
    Ok(())
}

fn backward_in_pairs<T: GradientReal, const N: usize>(
    layers: [Returning<'_, T>; N],
    x: &RowPairs,
    dx: &mut [T],
    gradients: &mut Gradients,
) -> Result<(), ModelError> {
    let rows = x.rows();
    let mut products = Vec::with_capacity(N);
    for Returning { linear, low, dy } in layers {
        let Rows::Pairs(dy) = dy else {
            panic!("gradients are rounded where inputs are")
        };
        let mut update = None;
        if let (Some(lora), Some(low)) = (&linear.lora, low) {
            let scale = T::from_f64(lora.scale);
            let mut dlow = Buffer::new(rows * lora.rank);
            let b = lora.b.panels::<T>()?;
            let term = Term::new(scale, dy, &b);
            ops::linears_backward(&[term], Write::Replace, &mut dlow);
            if let Some(slot) = lora.b.slot() {
                let (sums, width) = (T::sums(gradients, slot), linear.outputs);
                let orientation = Orientation::Turned;
                ops::add_outer_products_of_pairs(scale, low, dy, width, orientation, sums);
            }
            if let Some(slot) = lora.a.slot() {
                let (sums, width) = (T::sums(gradients, slot), linear.inputs);
                let orientation = Orientation::Upright;
                ops::add_outer_products_of_pairs(T::ONE, &dlow, x, width, orientation, sums);
            }
            let dlow = RowPairs::new(&dlow, rows, 0..lora.rank, lora.rank);
            update = Some((dlow, lora.a.panels::<T>()?));
        }
        products.push((update, dy, linear.weight.panels::<T>()?));
    }
    let mut terms = Vec::with_capacity(2 * N);
    for (update, dy, weight) in &products {
        if let Some((dlow, a)) = update {
            terms.push(Term::new(T::ONE, dlow, a));
        }
        terms.push(Term::new(T::ONE, *dy, weight));
    }
    ops::linears_backward(&terms, Write::Replace, dx);
    Ok(())
}

#[cfg(test)]
mod tests {
    use candle_core::{DType, Device, Tensor, Var};

    use super::*;
    use crate::engine::model::adapters::AdapterRegistry;
    use crate::engine::model::linear::ParameterBuilder;
    use crate::engine::model::tests_support::{GoldenCase, golden};
    use crate::engine::model::{LoraConfig, PackedBatch, Trainable, WeightFormat, Weights};

    /// The layer of a golden case, with its adapter.
    fn layer(case: &GoldenCase) -> (Linear, Vec<(String, Var)>) {
        let matrix = |key: &str| {
            let rows = case.rows("inputs", key);
            let shape = (rows.len(), rows[0].len());
            Tensor::from_vec(rows.concat(), shape, &Device::Cpu).unwrap()
        };
        let (weight, a, b) = (matrix("W"), matrix("A"), matrix("B"));
        let trainable = Trainable::Lora(LoraConfig {
            rank: a.dim(0).unwrap(),
            alpha: case.float("inputs", "alpha"),
            target_modules: vec!["q_proj".to_owned()],
            ..LoraConfig::default()
        });
        let (outputs, inputs) = weight.dims2().unwrap();
        let weights = Weights::from([("q_proj.weight".to_owned(), weight)]);
        let mut builder = ParameterBuilder::new(
            weights,
            &trainable,
            DType::F64,
            &Device::Cpu,
            0,
            true,
            WeightFormat::Wide,
        );
        let linear = builder
            .take_linear("q_proj", outputs, inputs, false)
            .unwrap();
        let variables = builder.finish().unwrap();
        variables[0].1.set(&a).unwrap();
        variables[1].1.set(&b).unwrap();
        (linear, variables)
    }

    fn run(linear: &Linear, x: &[f64], adapters: Adapters) -> (Vec<f64>, Option<Vec<f64>>) {
        let mut y = vec![0.0; linear.outputs];
        let batch = PackedBatch::from_sequences([[0]]);
        let adapters = AdapterRegistry::default().rows(&batch, adapters).unwrap();
        let x = Rows::Wide(x);
        let [low] = forward([linear], x, 1, &adapters, Write::Replace, [&mut y]).unwrap();
        (y, low.map(|low| low.to_vec()))
    }

    #[track_caller]
    fn assert_close(found: &[f64], expected: &[f64]) {
        assert_eq!(found.len(), expected.len());
        for (found, expected) in found.iter().zip(expected) {
            assert!((found - expected).abs() < 1e-12, "{found} {expected}");
        }
    }

    #[test]
    fn a_fresh_adapter_adds_nothing_and_only_b_has_a_gradient() {
        let case = golden("lora_forward_and_init_gradient");
        let (linear, variables) = layer(&case);
        let x = case.floats("inputs", "x");
        let (y, low) = run(&linear, &x, Adapters::On);
        assert_close(&y, &case.floats("expected", "y"));
        assert_eq!(
            y,
            run(&linear, &x, Adapters::Off).0,
            "the policy is its own reference"
        );
        let shapes = variables
            .iter()
            .map(|(name, var)| (name.clone(), var.shape().clone()))
            .collect();
        let mut gradients = Gradients::zeros(shapes, DType::F64, &Device::Cpu, true);
        let dy = case.floats("inputs", "grad_y");
        let mut dx = vec![0.0; 2];
        let returning = Returning {
            linear: &linear,
            low: low.as_deref(),
            dy: Rows::Wide(&dy),
        };
        backward(
            [returning],
            Rows::Wide(&x),
            1,
            &RowAdapters::none(),
            &mut dx,
            &mut gradients,
        )
        .unwrap();
        let read = |index: usize| {
            gradients
                .tensor(index)
                .unwrap()
                .flatten_all()
                .unwrap()
                .to_vec1::<f64>()
                .unwrap()
        };
        assert_eq!(read(0), case.rows("expected", "grad_A").concat());
        assert_close(&read(1), &case.rows("expected", "grad_B").concat());
    }

    #[test]
    fn a_trained_adapter_computes_what_the_merged_weight_does() {
        let case = golden("lora_merged_equals_unmerged");
        let (linear, _) = layer(&case);
        let x = case.floats("inputs", "x");
        let (y, _) = run(&linear, &x, Adapters::On);
        assert_close(&y, &case.floats("expected", "y"));
        let merged = case.rows("expected", "W_merged");
        let product: Vec<f64> = merged
            .iter()
            .map(|row| row.iter().zip(&x).map(|(w, x)| w * x).sum())
            .collect();
        assert_close(&y, &product);
    }
}
