//! Linear layers whose adapter reads less than the layer does, while it is trained.
//!
//! Each adapter drops inputs of its own, so its first product is apart from the layer's.

use super::super::ModelError;
use super::super::adapters::RowAdapters;
use super::super::dropout::RowDropout;
use super::super::gradients::{GradientReal, Gradients};
use super::super::linear::{Linear, Lora};
use super::super::ops::{self, Buffer, Orientation, PackedRows, Real, Term, Write};
use super::linear::{self, Returning, Rows, add_update};

/// Does what [`linear::forward`] does, with the adapters' inputs dropped.
pub(super) fn forward<T: Real, const N: usize>(
    linears: [&Linear; N],
    x: &[T],
    rows: usize,
    dropout: &RowDropout,
    write: Write,
    mut y: [&mut [T]; N],
) -> Result<[Option<Buffer<T>>; N], ModelError> {
    let of_base = y.each_mut().map(|y| &mut **y);
    let base = RowAdapters::none();
    linear::forward(linears, Rows::Wide(x), rows, &base, write, of_base)?;
    let mut lows = [const { None }; N];
    for ((linear, y), kept) in linears.iter().zip(y).zip(&mut lows) {
        if let Some(lora) = &linear.lora {
            let mut low = Buffer::new(rows * lora.rank);
            let (x, a) = (input(linear, lora, x, dropout), lora.a.panels::<T>()?);
            ops::linear(T::ONE, &x, rows, &a, Write::Replace, &mut low);
            add_update(lora, &low, rows, y)?;
            *kept = Some(low);
        }
    }
    Ok(lows)
}

/// Does what [`linear::backward`] does, through what [`forward`] did.
pub(super) fn backward<T: GradientReal, const N: usize>(
    layers: [Returning<'_, T>; N],
    x: &[T],
    rows: usize,
    dropout: &RowDropout,
    dx: &mut [T],
    gradients: &mut Gradients,
) -> Result<(), ModelError> {
    let of_base = layers.map(|layer| Returning { low: None, ..layer });
    let base = RowAdapters::none();
    linear::backward(of_base, Rows::Wide(x), rows, &base, dx, gradients)?;
    for Returning { linear, low, dy } in layers {
        let (Some(lora), Some(low), Rows::Wide(dy)) = (&linear.lora, low, dy) else {
            continue;
        };
        let scale = T::from_f64(lora.scale);
        let (a, b) = (lora.a.panels::<T>()?, lora.b.panels::<T>()?);
        let outputs = linear.outputs;
        let packed = PackedRows::new(dy, rows, 0..outputs, outputs);
        let mut dlow = vec![T::ZERO; rows * lora.rank];
        ops::linears_backward(&[Term::new(scale, &packed, &b)], Write::Replace, &mut dlow);
        if let Some(slot) = lora.b.slot() {
            let sums = T::sums(gradients, slot);
            ops::add_outer_products(scale, low, dy, rows, Orientation::Turned, sums);
        }
        if let Some(slot) = lora.a.slot() {
            let (x, sums) = (input(linear, lora, x, dropout), T::sums(gradients, slot));
            ops::add_outer_products(T::ONE, &dlow, &x, rows, Orientation::Upright, sums);
        }
        let packed = PackedRows::new(&dlow, rows, 0..lora.rank, lora.rank);
        let mut dinput = vec![T::ZERO; rows * linear.inputs];
        ops::linears_backward(
            &[Term::new(T::ONE, &packed, &a)],
            Write::Replace,
            &mut dinput,
        );
        dropout.apply(lora.module(), linear.inputs, &mut dinput);
        dx.iter_mut().zip(&dinput).for_each(|(dx, &d)| *dx += d);
    }
    Ok(())
}

/// Returns what an adapter reads of a layer's inputs.
fn input<T: Real>(linear: &Linear, lora: &Lora, x: &[T], dropout: &RowDropout) -> Vec<T> {
    let mut x = x.to_vec();
    dropout.apply(lora.module(), linear.inputs, &mut x);
    x
}
