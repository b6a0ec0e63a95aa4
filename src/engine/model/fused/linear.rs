//! Linear layers with an optional adapter, forward and backward.

use super::super::Adapters;
use super::super::ModelError;
use super::super::adapters::RowAdapters;
use super::super::gradients::{GradientReal, Gradients};
use super::super::linear::{Linear, Lora, Parameter};
use super::super::ops::{
    self, Matrix, Orientation, PackedRows, Panels, Product, Real, Term, Values, Write, matmul,
};
use super::dropout;

/// Writes or adds `x W^T + b + scale * (x A^T) B^T` to `y` for each layer and its `y`, and returns each
/// one's `x A^T` if the model has an adapter of its own there.
pub(super) fn forward<T: Real, const N: usize>(
    linears: [&Linear; N],
    x: &[T],
    rows: usize,
    adapters: &RowAdapters,
    write: Write,
    mut y: [&mut [T]; N],
) -> Result<[Option<Vec<T>>; N], ModelError> {
    if let (Adapters::On, Some(dropout)) = (adapters.own, &adapters.dropout) {
        return dropout::forward(linears, x, rows, dropout, write, y);
    }
    let mut low = [const { None }; N];
    let mut weights = Vec::with_capacity(N);
    for (linear, low) in linears.iter().zip(&mut low) {
        let mut a = None;
        if let (Some(lora), Adapters::On) = (&linear.lora, adapters.own) {
            *low = Some(vec![T::ZERO; rows * lora.rank]);
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
        if let Some(bias) = &linear.bias {
            let bias = Values::<T>::of(bias.tensor())?;
            for y in y.chunks_exact_mut(linear.outputs) {
                y.iter_mut().zip(bias.iter()).for_each(|(y, &b)| *y += b);
            }
        }
        for (rows, lora) in adapters.updates(linear) {
            let x = &x[rows.start * linear.inputs..rows.end * linear.inputs];
            let y = &mut y[rows.start * linear.outputs..rows.end * linear.outputs];
            let mut low = vec![T::ZERO; rows.len() * lora.rank];
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

/// A layer on its way back.
#[derive(Clone, Copy)]
pub(super) struct Returning<'a, T> {
    pub(super) linear: &'a Linear,
    /// What [`forward`] returned.
    pub(super) low: Option<&'a [T]>,
    /// The gradient of its output, `[rows, outputs]`.
    pub(super) dy: &'a [T],
}

/// Adds the gradients of the variables of layers that read the same `x`, and writes that of `x` to `dx`.
pub(super) fn backward<T: GradientReal, const N: usize>(
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
        let b = match (&linear.lora, low) {
            (Some(lora), Some(_)) => Some(lora.b.panels::<T>()?),
            _ => None,
        };
        let readers: Vec<&Panels<T>> = std::iter::once(&weight).chain(&b).map(|w| &**w).collect();
        let packed = PackedRows::new(dy, rows, 0..outputs, outputs, &readers);
        if let (Some(lora), Some(low), Some(b)) = (&linear.lora, low, b) {
            let scale = T::from_f64(lora.scale);
            let mut dlow = vec![T::ZERO; rows * lora.rank];
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
            let dlow = PackedRows::new(&dlow, rows, 0..lora.rank, lora.rank, &[&a]);
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
        let [low] = forward([linear], x, 1, &adapters, Write::Replace, [&mut y]).unwrap();
        (y, low)
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
            dy: &dy,
        };
        backward(
            [returning],
            &x,
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
