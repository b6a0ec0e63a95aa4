//! Products in bf16: the same bits however they are made, and those of their definition.

use std::collections::BTreeMap;

use super::super::tests::{SHAPES, fill, product};
use super::super::{
    Level, Orientation, PackedRows, Panels, Product, Term, TermRows, WeightFormat, Write, linear,
    linears, linears_backward,
};
use super::*;

/// Returns the bf16 next to `value`.
fn rounded(value: f32) -> f32 {
    number(u32::from(round(value)), false)
}

fn pack(weight: &[f32], outputs: usize, inputs: usize) -> Panels<f32> {
    Panels::pack(weight, outputs, inputs, WeightFormat::Bf16Products)
}

/// Returns the sum of products of `k` pairs of numbers, each rounded, in the order of the pairs and in
/// each from the second to the first.
fn definition(k: usize, a: impl Fn(usize) -> f32, b: impl Fn(usize) -> f32) -> f32 {
    definition_from(0.0, k, a, b)
}

/// Adds what [`definition`] says.
fn definition_from(
    mut sum: f32,
    k: usize,
    a: impl Fn(usize) -> f32,
    b: impl Fn(usize) -> f32,
) -> f32 {
    for first in (0..k).step_by(2) {
        for at in [first + 1, first].into_iter().filter(|&at| at < k) {
            sum = rounded(a(at)).mul_add(rounded(b(at)), sum);
        }
    }
    sum
}

#[test]
fn numbers_are_rounded_to_the_nearest() {
    for (value, expected) in [
        (0.0, 0x0000),
        (-0.0, 0x8000),
        (1.0, 0x3f80),
        // Half way: to the even neighbour.
        (1.0 + 1.0 / 256.0, 0x3f80),
        (1.0 + 3.0 / 256.0, 0x3f82),
        (1.0 + 1.001 / 256.0, 0x3f81),
        (-3.0, 0xc040),
        (f32::MIN_POSITIVE, 0x0080),
        // Denormals, one of which is next to the smallest number.
        (f32::from_bits(0x007f_ffff), 0x0000),
        (f32::from_bits(0x8000_0001), 0x8000),
        (f32::MAX, 0x7f7f),
        (f32::MIN, 0xff7f),
        (f32::INFINITY, 0x7f80),
        (f32::NEG_INFINITY, 0xff80),
        (f32::from_bits(0x7f80_0001), 0x7fc0),
        (f32::from_bits(0xffff_ffff), 0xffff),
    ] {
        assert_eq!(round(value), expected, "{value:e}");
    }
    for value in fill(1000, 7) {
        assert!((rounded(value) - value).abs() <= value.abs() / 256.0);
        assert_eq!(rounded(rounded(value)), rounded(value));
    }
}

#[test]
fn rows_are_rounded_alike_with_the_instruction_and_without() {
    let specials = [
        f32::MAX,
        f32::MIN,
        f32::INFINITY,
        f32::NEG_INFINITY,
        f32::from_bits(0x7f7f_7fff),
        f32::from_bits(0x7f7f_8000),
        f32::from_bits(0x7f80_0001),
        f32::from_bits(0xffc0_1234),
        f32::MIN_POSITIVE,
        f32::from_bits(0x007f_ffff),
        f32::from_bits(0x8000_0001),
        -0.0,
        1.0 + 1.0 / 256.0,
        1.0 + 3.0 / 256.0,
    ];
    for len in [1, 2, 31, 32, 33, 64, 200] {
        let mut x = fill(len, 3);
        for at in (0..len).step_by(3) {
            x[at] = specials[at / 3 % specials.len()];
        }
        let pairs = |dots: Dots| {
            let mut pairs = vec![7; pairs_of(len)];
            dots.round_row(&x, &mut pairs);
            pairs
        };
        let found = pairs(Dots::Emulated);
        assert_eq!(found, pairs(Dots::best()));
        for (at, &x) in x.iter().enumerate() {
            let number = found[at / 2] >> (16 * (at % 2)) & 0xffff;
            assert_eq!(number, u32::from(round(x)), "{x:e}");
        }
        assert!(found[len.div_ceil(2)..].iter().all(|&pair| pair == 0));
    }
}

/// Bits of bf16 that meet each other in products: limits, denormals, what is no number, and numbers whose
/// products are next to the smallest.
fn patterns(count: usize) -> Vec<u16> {
    const SPECIAL: [u16; 17] = [
        0x0000, 0x8000, 0x0001, 0x807f, 0x007f, 0x0080, 0x8080, 0x00ff, 0x3f80, 0xbf80, 0x3f81,
        0x7f7f, 0xff7f, 0x7f80, 0xff80, 0x7fc0, 0x7f81,
    ];
    let mut state = 1_u64;
    let mut random = |below: u16| {
        state = (state.wrapping_mul(6_364_136_223_846_793_005)).wrapping_add(1);
        u16::try_from((state >> 33) % u64::from(below)).unwrap()
    };
    (0..count)
        .map(|_| {
            let bits = random(u16::MAX) | random(2) << 15;
            match random(16) {
                0 => SPECIAL[usize::from(random(17))],
                // From 2^-67 to 2^-60, where products are next to the smallest number.
                1..8 => 0x1e00 + (bits & 0x83ff),
                // From 2^-2 to 2^2.
                8..15 => 0x3e80 + (bits & 0x81ff),
                _ => bits,
            }
        })
        .collect()
}

/// Returns pairs as products meet them: without denormals, which rounding turns into zero.
fn pairs(numbers: &[u16]) -> Vec<u32> {
    let (numbers, _) = numbers.as_chunks::<2>();
    let met = |bits: u16| round(number(u32::from(bits), false));
    (numbers.iter())
        .map(|&[first, second]| pair(met(first), met(second)))
        .collect()
}

/// Returns what `dots` adds to `start` in two parts.
fn sums(
    dots: Dots,
    start: &[f32; PANEL],
    x: &[u32],
    rows: usize,
    panel: &[u32],
) -> Vec<[f32; PANEL]> {
    let mut sums = vec![[f32::NAN; PANEL]; rows];
    let pairs = x.len() / rows;
    let tile = |part: Range<usize>| PairTile {
        x: RowTile {
            values: &x[part.start..],
            stride: pairs,
            rows,
            pairs: part.len(),
        },
        panel: &panel[part.start * PANEL..part.end * PANEL],
    };
    let half = pairs / 2 / BLOCK * BLOCK;
    // From zero with the first half, from `start` with the second.
    dots.multiply(
        [rows, PANEL],
        &[tile(0..half)],
        |_, sums| {
            for (sum, start) in sums.iter_mut().zip(start) {
                *sum = if *start == 0.0 { *sum } else { *start };
            }
        },
        Some(tile(half..pairs)),
        |row, found| sums[row] = *found,
    );
    sums
}

#[test]
fn emulated_sums_are_those_of_the_instruction() {
    let hardware = Dots::best();
    if hardware == Dots::Emulated {
        println!("skipped: no AVX512-BF16 here");
        return;
    }
    const PAIRS: usize = 2 * BLOCK;
    let (rows, rounds) = (12, 300);
    let numbers = patterns(2 * PAIRS * (rows + PANEL) * rounds);
    let mut seen = BTreeMap::new();
    for numbers in numbers.chunks_exact(2 * PAIRS * (rows + PANEL)) {
        let (x, panel) = numbers.split_at(2 * PAIRS * rows);
        let (mut x, panel) = (pairs(x), pairs(panel));
        // Rows of one pair, of two and so on; the rest is zero. Longer sums are seldom numbers.
        for (at, x) in x.iter_mut().enumerate() {
            if at % PAIRS > at / PAIRS % 6 {
                *x = 0;
            }
        }
        // As sums go on from what is there: from zero, from denormals and from others.
        let start = std::array::from_fn(|at| match at % 4 {
            0 | 1 => 0.0,
            2 => f32::from_bits(panel[at] >> 9 | panel[at] & 0x8000_0000),
            _ => number(panel[at], false),
        });
        let found = sums(Dots::Emulated, &start, &x, rows, &panel);
        let expected = sums(hardware, &start, &x, rows, &panel);
        let pairs = found.as_flattened().iter().zip(expected.as_flattened());
        for (found, expected) in pairs {
            let is_same =
                found.to_bits() == expected.to_bits() || found.is_nan() && expected.is_nan();
            assert!(is_same, "{found:e} {expected:e}");
            let class = format!("{:?}", expected.classify());
            let is_smallest = expected.abs() < 4.0 * f32::MIN_POSITIVE && *expected != 0.0;
            *seen.entry(class).or_insert(0) += 1;
            *seen.entry("smallest".to_owned()).or_insert(0) += usize::from(is_smallest);
        }
    }
    assert!(!seen.contains_key("Subnormal"), "{seen:?}");
    for class in ["Nan", "Infinite", "Zero", "Normal", "smallest"] {
        let count = seen.get(class).copied().unwrap_or(0);
        assert!(count > 100, "{seen:?}");
    }
}

/// A sum that is denormal by less than a step of the smallest normal numbers is zero, although it is
/// that number if it is rounded as denormals are.
#[test]
fn what_is_denormal_is_told_before_it_is_rounded() {
    let bf16 = |exponent: i32, mantissa: u16| {
        let exponent = u16::try_from(exponent + 127).unwrap();
        exponent << 7 | mantissa
    };
    // 2^-126, less 1.5 * 2^-151, less a quarter of that.
    for (exponent, expected) in [(-76, 0.0), (-78, f32::MIN_POSITIVE)] {
        let mut x = vec![0; BLOCK];
        let mut panel = vec![0; BLOCK * PANEL];
        x[0] = pair(bf16(-75, 0) | 0x8000, bf16(-63, 0));
        panel[0] = pair(bf16(exponent, 0x40), bf16(-63, 0));
        let plain =
            (-(2.0_f32.powi(-75))).mul_add(1.5 * 2.0_f32.powi(exponent), 2.0_f32.powi(-126));
        assert_eq!(plain, f32::MIN_POSITIVE);
        for dots in [Dots::Emulated, Dots::best()] {
            let found = sums(dots, &[0.0; PANEL], &x, 1, &panel)[0][0];
            assert_eq!(found, expected, "{dots:?} 2^{exponent}");
        }
    }
}

#[test]
fn products_are_those_of_the_definition() {
    for (k, n) in SHAPES {
        let (w, x) = (fill(n * k, 2), fill(15 * k, 1));
        let weight = pack(&w, n, k);
        for level in Level::available() {
            for m in [1, 7, 15] {
                let y = product(level, &x[..m * k], m, &weight);
                for (i, &y) in y.iter().enumerate() {
                    let (x, w) = (&x[i / n * k..], &w[i % n * k..]);
                    let expected = definition(k, |at| x[at], |at| w[at]);
                    assert_eq!(y, expected, "{level:?} k {k} n {n} m {m} at {i}");
                }
            }
        }
    }
}

#[test]
fn backward_products_are_those_of_the_definition() {
    let m = 27;
    for (inputs, outputs) in SHAPES {
        let (w, dy) = (fill(outputs * inputs, 2), fill(m * outputs, 3));
        let weight = pack(&w, outputs, inputs);
        for rows in [m, 1] {
            let packed = RowPairs::new(&dy[..rows * outputs], rows, 0..outputs, outputs);
            let mut dx = vec![f32::NAN; rows * inputs];
            let term = Term::new(1.0, &packed, &weight);
            linears_backward(&[term], Write::Replace, &mut dx);
            for (at, &found) in dx.iter().enumerate() {
                let (i, j) = (at / inputs, at % inputs);
                let (dy, w) = (&dy[i * outputs..], &w[j..]);
                let expected = definition(outputs, |at| dy[at], |at| w[at * inputs]);
                assert_eq!(found, expected, "inputs {inputs} outputs {outputs} at {at}");
            }
        }
    }
}

/// An adapter in `f32` beside weights in bf16, and a head whose outputs come in parts.
#[test]
fn products_of_both_kinds_together_are_those_apart() {
    let (m, inputs, outputs) = (13, 50, 100);
    let (w, v) = (fill(outputs * inputs, 2), fill(8 * inputs, 5));
    let bf16 = pack(&w, outputs, inputs);
    let wide = Panels::pack(&v, 8, inputs, WeightFormat::Wide);
    let x = fill(m * inputs, 1);
    let mut apart = [vec![0.0; m * outputs], vec![0.0; m * 8]];
    let [y, z] = &mut apart;
    linear(1.0, &x, m, &bf16, Write::Replace, y);
    linear(1.0, &x, m, &wide, Write::Replace, z);
    let mut together = apart.each_ref().map(|y| vec![f32::NAN; y.len()]);
    let [y, z] = &mut together;
    let product = |weight, y| Product {
        weight,
        write: Write::Replace,
        y,
    };
    linears(1.0, &x, m, vec![product(&wide, z), product(&bf16, y)]);
    assert_eq!(together, apart);

    let (dy, dz) = (fill(m * outputs, 3), fill(m * 8, 4));
    let dz = PackedRows::new(&dz, m, 0..8, 8);
    let whole = RowPairs::new(&dy, m, 0..outputs, outputs);
    let (mut expected, mut found) = (vec![0.0; m * inputs], vec![f32::NAN; m * inputs]);
    let term = Term::new(1.0, &whole, &bf16);
    linears_backward(&[term], Write::Replace, &mut expected);
    linears_backward(&[Term::new(0.5, &dz, &wide)], Write::Add, &mut expected);
    let terms = [Term::new(1.0, &whole, &bf16), Term::new(0.5, &dz, &wide)];
    linears_backward(&terms, Write::Replace, &mut found);
    assert_eq!(found, expected);

    linears_backward(&terms[..1], Write::Replace, &mut expected);
    for (part, write) in [(0..64, Write::Replace), (64..outputs, Write::Add)] {
        let dy = RowPairs::new(&dy, m, part.clone(), outputs);
        let term = Term {
            alpha: 1.0,
            dy: TermRows::from(&dy),
            weight: &bf16,
            outputs: part,
        };
        linears_backward(&[term], write, &mut found);
    }
    for (found, expected) in found.iter().zip(expected) {
        assert!((found - expected).abs() < 1e-5, "{found} {expected}");
    }
}

/// Several matrices behind each other are one sum, as an adapter's are behind those of its layer.
#[test]
fn terms_are_one_sum() {
    let (m, inputs) = (13, 50);
    let shapes = [(16, 2), (70, 3), (33, 4)];
    let factors = shapes.map(|(outputs, seed)| {
        (
            fill(outputs * inputs, seed),
            fill(m * outputs, seed + 10),
            outputs,
        )
    });
    let panels = factors
        .each_ref()
        .map(|(w, _, outputs)| pack(w, *outputs, inputs));
    let rows = factors
        .each_ref()
        .map(|(_, dy, outputs)| RowPairs::new(dy, m, 0..*outputs, *outputs));
    let terms: Vec<Term<'_, f32>> = (rows.iter().zip(&panels))
        .map(|(rows, panels)| Term::new(1.0, rows, panels))
        .collect();
    let mut dx = vec![f32::NAN; m * inputs];
    linears_backward(&terms, Write::Replace, &mut dx);
    for (at, &found) in dx.iter().enumerate() {
        let (i, j) = (at / inputs, at % inputs);
        let mut expected = 0.0;
        for (w, dy, outputs) in &factors {
            expected = definition_from(
                expected,
                *outputs,
                |at| dy[i * outputs + at],
                |at| w[at * inputs + j],
            );
        }
        assert_eq!(found, expected, "{at}");
    }
}

/// An update goes on from what its layer has written, whether with it or later.
#[test]
fn updates_go_on_from_what_is_there() {
    let (inputs, rank) = (50, 16);
    for (m, outputs, write) in [(1, 33, Write::Replace), (30, 70, Write::Add)] {
        let (w, b) = (fill(outputs * inputs, 2), fill(outputs * rank, 3));
        let (x, low) = (fill(m * inputs, 1), fill(m * rank, 4));
        let (weight, b_panels) = (pack(&w, outputs, inputs), pack(&b, outputs, rank));
        let rows = RowPairs::new(&x, m, 0..inputs, inputs);
        let low_rows = RowPairs::new(&low, m, 0..rank, rank);
        let before = fill(m * outputs, 5);
        let product = |y: &mut [f32], update| {
            let product = PairProduct {
                weight: &weight,
                write,
                y,
                update,
            };
            linears_of_pairs(1.0, &rows, vec![product]);
        };
        let (mut together, mut apart) = (before.clone(), before.clone());
        product(&mut together, Some((&low_rows, &b_panels)));
        product(&mut apart, None);
        add_to_rows(&low_rows, &b_panels, &mut apart);
        assert_eq!(together, apart);
        for (at, &found) in together.iter().enumerate() {
            let (i, j) = (at / outputs, at % outputs);
            let sum = definition(inputs, |at| x[i * inputs + at], |at| w[j * inputs + at]);
            let start = if write == Write::Add { before[at] } else { 0.0 };
            let expected = definition_from(
                start + sum,
                rank,
                |at| low[i * rank + at],
                |at| b[j * rank + at],
            );
            assert_eq!(found, expected, "{at}");
        }
    }
}

#[test]
fn outer_products_are_those_of_the_definition() {
    // More tokens than lie side by side at a time, odd ones, and ranks of one group and of several.
    for (m, rank, width) in [(1, 1, 1), (31, 16, 70), (2101, 13, 33)] {
        let (low, x) = (fill(m * rank, 1), fill(m * width, 2));
        let rows = RowPairs::new(&x, m, 0..width, width);
        let mut upright = vec![1.0_f32; rank * width];
        let mut turned = upright.clone();
        let add = |orientation, sums: &mut [f32]| {
            add_outer_products_of_pairs(2.0, &low, &rows, width, orientation, sums);
        };
        add(Orientation::Upright, &mut upright);
        add(Orientation::Turned, &mut turned);
        for i in 0..rank {
            for j in 0..width {
                let mut expected = 1.0;
                for tokens in (0..m).step_by(2048) {
                    let count = 2048.min(m - tokens);
                    let sum = definition(
                        count,
                        |at| low[(tokens + at) * rank + i],
                        |at| x[(tokens + at) * width + j],
                    );
                    expected = 2.0_f32.mul_add(sum, expected);
                }
                assert_eq!(upright[i * width + j], expected, "{m} {i} {j}");
                assert_eq!(turned[j * rank + i], expected, "{m} {i} {j}");
            }
        }
    }
}

#[test]
fn packed_numbers_are_the_rounded_ones() {
    for (k, n) in SHAPES {
        let w = fill(n * k, 4);
        let panels = pack(&w, n, k);
        let expected: Vec<f32> = w.iter().map(|&w| rounded(w)).collect();
        assert_eq!(panels.unpack(), expected);
        let last = u32::try_from(n).unwrap() - 1;
        let mut row = vec![0.0; k];
        panels.copy_rows(&[last], &mut row);
        assert_eq!(row, expected[(n - 1) * k..]);
    }
}
