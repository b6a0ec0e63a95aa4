//! Products with panels: right, and the same bits whatever stands beside a row.

use super::*;

pub(super) fn fill(len: usize, seed: u32) -> Vec<f32> {
    let mut state = seed;
    (0..len)
        .map(|_| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 8) as f32 / (1 << 24) as f32 - 0.5
        })
        .collect()
}

pub(super) fn product(level: Level, x: &[f32], m: usize, weight: &Panels<f32>) -> Vec<f32> {
    let mut y = vec![f32::NAN; m * weight.outputs];
    let write = Write::Replace;
    let product = Product {
        weight,
        write,
        y: &mut y,
    };
    run(level, 1.0, x, m, vec![product]);
    y
}

/// Odd and even, below and above a panel, a tile and a task.
pub(super) const SHAPES: [(usize, usize); 8] = [
    (1, 1),
    (5, 3),
    (17, 31),
    (8, 32),
    (33, 33),
    (64, 96),
    (192, 100),
    (1025, 70),
];

#[test]
fn a_row_does_not_depend_on_the_rows_beside_it() {
    let formats = [WeightFormat::Wide, WeightFormat::Bf16Products];
    for (level, format) in Level::available().flat_map(|level| formats.map(|f| (level, f))) {
        for (k, n) in SHAPES {
            let weight = Panels::pack(&fill(n * k, 2), n, k, format);
            let x = fill(90 * k, 1);
            let all = product(level, &x, 90, &weight);
            for m in 1..=70 {
                // A different neighbourhood for each number of rows.
                let first = m % 20;
                let some = product(level, &x[first * k..(first + m) * k], m, &weight);
                assert_eq!(
                    some,
                    all[first * n..(first + m) * n],
                    "{level:?} {format:?} k {k} n {n} m {m}"
                );
            }
        }
    }
}

#[test]
fn products_match_the_definition_on_every_level() {
    for level in Level::available() {
        for (k, n) in SHAPES {
            let (w, x) = (fill(n * k, 2), fill(15 * k, 1));
            let y = product(level, &x, 15, &Panels::pack(&w, n, k, WeightFormat::Wide));
            for (i, &y) in y.iter().enumerate() {
                let (x, w) = (&x[i / n * k..][..k], &w[i % n * k..][..k]);
                let terms = || x.iter().zip(w).map(|(&x, &w)| f64::from(x) * f64::from(w));
                let size: f64 = terms().map(f64::abs).sum();
                let error = (f64::from(y) - terms().sum::<f64>()).abs();
                let bound = f64::from(f32::EPSILON) * size * (k as f64 + 1.0);
                assert!(error <= bound, "{level:?} k {k} n {n} at {i}: {error:e}");
            }
        }
    }
}

#[test]
fn products_together_are_those_apart() {
    let (m, k) = (7, 50);
    let x: Vec<f64> = fill(m * k, 1).into_iter().map(f64::from).collect();
    let pack = |n: usize, seed| {
        let w: Vec<f64> = fill(n * k, seed).into_iter().map(f64::from).collect();
        Panels::pack(&w, n, k, WeightFormat::Wide)
    };
    let (a, b) = (pack(40, 2), pack(16, 3));
    let (mut y_a, mut y_b) = (vec![0.0; m * 40], vec![1.0; m * 16]);
    linear(2.0, &x, m, &a, Write::Replace, &mut y_a);
    linear(2.0, &x, m, &b, Write::Add, &mut y_b);
    let (mut z_a, mut z_b) = (vec![0.0; m * 40], vec![1.0; m * 16]);
    let products = vec![
        Product {
            weight: &a,
            write: Write::Replace,
            y: &mut z_a,
        },
        Product {
            weight: &b,
            write: Write::Add,
            y: &mut z_b,
        },
    ];
    linears(2.0, &x, m, products);
    assert_eq!(z_a, y_a);
    assert_eq!(z_b, y_b);
    let expected = 1.0 + 2.0 * (0..k).map(|i| x[i] * b.unpack()[i]).sum::<f64>();
    assert!((y_b[0] - expected).abs() < 1e-12, "{} {expected}", y_b[0]);
}

#[test]
fn packing_loses_nothing() {
    for (k, n) in SHAPES {
        let w = fill(n * k, 4);
        let panels = Panels::pack(&w, n, k, WeightFormat::Wide);
        assert_eq!(panels.unpack(), w);
        let indices = [n - 1, 0, n / 2].map(|i| u32::try_from(i).unwrap());
        let mut rows = vec![0.0; indices.len() * k];
        panels.copy_rows(&indices, &mut rows);
        for (&index, row) in indices.iter().zip(rows.chunks_exact(k)) {
            assert_eq!(row, &w[index as usize * k..][..k]);
        }
    }
}

#[test]
fn a_target_hands_out_what_is_inside_only() {
    let mut values = [0.0_f32; 6];
    let target = Target::new(&mut values, 2, 3);
    let outside = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        #[expect(unsafe_code, reason = "what is tested")]
        // SAFETY: nothing else is borrowed from the target.
        let part = unsafe { target.part(1, 2, 2) };
        part.len()
    }));
    let message = *outside.unwrap_err().downcast::<&str>().unwrap();
    assert!(
        message.starts_with("assertion failed: row < self.rows"),
        "{message}"
    );
}

/// Weights that take less room are other weights, and nothing else: the products are those with the
/// same numbers in full precision, bit for bit.
#[test]
fn products_with_narrow_weights_are_those_with_the_same_numbers_kept_wide() {
    for format in [WeightFormat::Bf16, WeightFormat::Int8] {
        for (k, n) in SHAPES {
            let (w, x) = (fill(n * k, 2), fill(15 * k, 1));
            let narrow = Panels::pack(&w, n, k, format);
            let seen = narrow.unpack();
            if k > 1 {
                assert_ne!(seen, w, "{format:?} keeps less");
            }
            let wide = Panels::pack(&seen, n, k, WeightFormat::Wide);
            for level in Level::available() {
                for m in [1, 7, 15] {
                    let found = product(level, &x[..m * k], m, &narrow);
                    let expected = product(level, &x[..m * k], m, &wide);
                    assert_eq!(found, expected, "{format:?} {level:?} k {k} n {n} m {m}");
                }
            }
            let mut rows = vec![0.0; 2 * k];
            let indices = [u32::try_from(n).unwrap() - 1, 0];
            narrow.copy_rows(&indices, &mut rows);
            assert_eq!(rows, [&seen[(n - 1) * k..], &seen[..k]].concat());
        }
    }
}

#[test]
fn a_packed_matrix_has_as_many_bytes_as_is_said_of_it() {
    fn bytes<T: Real>(format: WeightFormat, inputs: usize, weight: &[T]) -> usize {
        match Stored::pack(weight, inputs, format) {
            Stored::Wide(values) => size_of_val(values.get()),
            Stored::Bf16(values) => size_of_val(values.get()),
            Stored::Pairs(values) => size_of_val(values.get()),
            Stored::Int8(values, scales) => size_of_val(values.get()) + size_of_val(scales.get()),
        }
    }
    for format in [
        WeightFormat::Wide,
        WeightFormat::Bf16,
        WeightFormat::Bf16Products,
        WeightFormat::Int8,
    ] {
        for (inputs, outputs) in SHAPES {
            let said = |number| format.packed_bytes(outputs, inputs, number);
            let single = bytes(format, inputs, &fill(outputs * inputs, 2));
            assert_eq!(said(4), single as u64, "{format:?} {outputs} {inputs}");
            let double = bytes(format, inputs, &vec![0.5_f64; outputs * inputs]);
            assert_eq!(said(8), double as u64, "{format:?} {outputs} {inputs}");
        }
    }
}

#[test]
fn narrow_weights_are_the_nearest() {
    let (k, n) = (100, 33);
    let w = fill(n * k, 5);
    let bf16 = Panels::pack(&w, n, k, WeightFormat::Bf16).unpack();
    for (&found, &w) in bf16.iter().zip(&w) {
        assert_eq!(found.to_bits() << 16, 0);
        assert!((found - w).abs() <= w.abs() / 256.0, "{found} {w}");
    }
    let again = Panels::pack(&bf16, n, k, WeightFormat::Bf16).unpack();
    assert_eq!(again, bf16, "nothing is lost of weights in bf16");
    assert_eq!(
        Panels::pack(&[1.0 + 1.0 / 256.0, f32::MAX], 2, 1, WeightFormat::Bf16).unpack(),
        [1.0, f32::from_bits(0x7f7f_0000)],
        "ties to even, and no infinity"
    );
    let int8 = Panels::pack(&w, n, k, WeightFormat::Int8).unpack();
    for (found, w) in int8.chunks(k).zip(w.chunks(k)) {
        for (found, w) in found.chunks(32).zip(w.chunks(32)) {
            let largest = w.iter().map(|w| w.abs()).fold(0.0, f32::max);
            for (found, w) in found.iter().zip(w) {
                assert!((found - w).abs() <= 0.501 * largest / 127.0, "{found} {w}");
            }
        }
    }
}

/// Returns `sum over l of a(i, l) * b(l, j)` and the sum of the terms' sizes.
fn definition(k: usize, a: impl Fn(usize) -> f32, b: impl Fn(usize) -> f32) -> (f64, f64) {
    let terms = (0..k).map(|l| f64::from(a(l)) * f64::from(b(l)));
    terms.fold((0.0, 0.0), |(sum, size), term| {
        (sum + term, size + term.abs())
    })
}

#[test]
fn backward_products_match_the_definition() {
    let m = 27;
    for (inputs, outputs) in SHAPES.into_iter().chain([(70, 4100)]) {
        let (w, v) = (fill(outputs * inputs, 2), fill(5 * inputs, 5));
        let (dy, dz) = (fill(m * outputs, 3), fill(m * 5, 4));
        let (w_panels, v_panels) = (
            Panels::pack(&w, outputs, inputs, WeightFormat::Wide),
            Panels::pack(&v, 5, inputs, WeightFormat::Wide),
        );
        let (packed_dy, packed_dz) = (
            PackedRows::new(&dy, m, 0..outputs, outputs),
            PackedRows::new(&dz, m, 0..5, 5),
        );
        let terms = [
            Term::new(1.0, &packed_dy, &w_panels),
            Term::new(0.5, &packed_dz, &v_panels),
        ];
        let mut dx = vec![f32::NAN; m * inputs];
        linears_backward(&terms, Write::Replace, &mut dx);
        for (at, &found) in dx.iter().enumerate() {
            let (i, j) = (at / inputs, at % inputs);
            let first = definition(outputs, |l| dy[i * outputs + l], |l| w[l * inputs + j]);
            let second = definition(5, |l| dz[i * 5 + l], |l| v[l * inputs + j]);
            let error = (f64::from(found) - first.0 - 0.5 * second.0).abs();
            let bound = f64::from(f32::EPSILON) * (first.1 + second.1) * (outputs as f64 + 6.0);
            assert!(
                error <= bound,
                "inputs {inputs} outputs {outputs} at {at}: {error:e}"
            );
        }
        let before = dx.clone();
        linears_backward(&terms[1..], Write::Add, &mut dx);
        assert!(dx != before, "a product is added");
    }
}

#[test]
fn parts_of_the_outputs_add_up_to_the_whole_product() {
    let (m, inputs, outputs) = (13, 40, 100);
    let (w, dy) = (fill(outputs * inputs, 2), fill(m * outputs, 3));
    let weight = Panels::pack(&w, outputs, inputs, WeightFormat::Wide);
    let whole = PackedRows::new(&dy, m, 0..outputs, outputs);
    let (mut expected, mut found) = (vec![0.0; m * inputs], vec![f32::NAN; m * inputs]);
    linears_backward(
        &[Term::new(1.0, &whole, &weight)],
        Write::Replace,
        &mut expected,
    );
    for (part, write) in [(0..64, Write::Replace), (64..outputs, Write::Add)] {
        let dy = PackedRows::new(&dy, m, part.clone(), outputs);
        let term = Term {
            alpha: 1.0,
            dy: TermRows::from(&dy),
            weight: &weight,
            outputs: part,
        };
        linears_backward(&[term], write, &mut found);
    }
    for (found, expected) in found.iter().zip(expected) {
        assert!((found - expected).abs() < 1e-5, "{found} {expected}");
    }
}

#[test]
fn outer_products_match_the_definition_either_way_round() {
    // More tokens than lie side by side at a time, and ranks of one group and of several.
    for (m, rank, width) in [(1, 1, 1), (30, 16, 70), (2100, 13, 33)] {
        let (low, x) = (fill(m * rank, 1), fill(m * width, 2));
        let mut upright = vec![1.0_f32; rank * width];
        let mut turned = upright.clone();
        add_outer_products(2.0, &low, &x, m, Orientation::Upright, &mut upright);
        add_outer_products(2.0, &low, &x, m, Orientation::Turned, &mut turned);
        for i in 0..rank {
            for j in 0..width {
                let (sum, size) = definition(m, |l| low[l * rank + i], |l| x[l * width + j]);
                let found = upright[i * width + j];
                let error = (f64::from(found) - 1.0 - 2.0 * sum).abs();
                let bound = f64::from(f32::EPSILON) * (size + 1.0) * (m as f64 + 2.0);
                assert!(error <= bound, "{m} {rank} {width} at {i} {j}: {error:e}");
                assert_eq!(found, turned[j * rank + i]);
            }
        }
    }
}
