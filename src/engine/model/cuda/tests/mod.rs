//! The kernels' sources against their twins.

mod emulator;

use candle_core::Device;
use rstest::rstest;

use super::attention::Attend;
use super::layer::{AddNorm, Rotate, Swiglu};
use super::sample::Sample;
use super::*;
use crate::engine::kv_cache::{KvCache, PagedRows, RowId};
use crate::engine::model::{ModelError, PackedBatch};

/// Returns numbers between -2 and 2, some of them equal.
fn numbers(shape: impl Into<Shape>, seed: usize, dtype: DType) -> Tensor {
    let shape = shape.into();
    let number = |i: usize| ((i * 7919 + seed * 104_729) % 2003) as f64 / 500.0 - 2.0;
    let numbers: Vec<f64> = (0..shape.elem_count()).map(number).collect();
    let tensor = Tensor::from_vec(numbers, shape, &Device::Cpu).unwrap();
    tensor.to_dtype(dtype).unwrap()
}

fn bytes(tensor: &Tensor) -> Vec<u8> {
    let tensor = tensor.contiguous().unwrap().flatten_all().unwrap();
    match tensor.dtype() {
        DType::U32 => tensor
            .to_vec1::<u32>()
            .unwrap()
            .iter()
            .flat_map(|x| x.to_le_bytes())
            .collect(),
        DType::F32 => tensor
            .to_vec1::<f32>()
            .unwrap()
            .iter()
            .flat_map(|x| x.to_le_bytes())
            .collect(),
        DType::F64 => tensor
            .to_vec1::<f64>()
            .unwrap()
            .iter()
            .flat_map(|x| x.to_le_bytes())
            .collect(),
        DType::BF16 => tensor
            .to_vec1::<bf16>()
            .unwrap()
            .iter()
            .flat_map(|x| x.to_le_bytes())
            .collect(),
        other => panic!("{other:?}"),
    }
}

/// Returns what a kernel's source makes.
fn emulate<K: Make>(kernel: &K, inputs: &[&Tensor]) -> Tensor {
    let shape = kernel.shape();
    let size = shape.elem_count() * kernel.dtype().size_in_bytes();
    let inputs = inputs.iter().map(|tensor| bytes(tensor)).collect();
    let launches = kernel.launches().unwrap();
    // What is not written stays NaN.
    let made = emulator::run(&launches, vec![0xff; size], kernel.scratch_bytes(), inputs);
    Tensor::from_raw_buffer(&made, kernel.dtype(), shape.dims(), &Device::Cpu).unwrap()
}

#[track_caller]
fn assert_close(found: &Tensor, expected: &Tensor, tolerance: f64) {
    assert_eq!(found.dims(), expected.dims());
    let values = |x: &Tensor| -> Vec<f64> {
        let x = x.to_dtype(DType::F64).unwrap();
        x.flatten_all().unwrap().to_vec1().unwrap()
    };
    let (found, expected) = (values(found), values(expected));
    assert!(expected.iter().any(|value| *value != 0.0));
    for (i, (found, expected)) in found.iter().zip(&expected).enumerate() {
        let bound = tolerance * expected.abs().max(0.1);
        assert!((found - expected).abs() <= bound, "{i}: {found} {expected}");
    }
}

/// Bits that the last step of a kernel may be off by: its exponentials are another library's.
fn tolerance(dtype: DType) -> f64 {
    match dtype {
        DType::F64 => 1e-13,
        DType::BF16 => 8e-3,
        _ => 2e-6,
    }
}

const DTYPES: [DType; 3] = [DType::F32, DType::F64, DType::BF16];

#[test]
fn norms_and_gates_are_their_twins() {
    if !emulator::has_compiler() {
        return;
    }
    for dtype in DTYPES {
        let (rows, width) = (3, 150);
        let [x, delta] = [1, 2].map(|seed| numbers((rows, width), seed, dtype));
        let weight = numbers(width, 3, dtype);
        for has_delta in [true, false] {
            let kernel = AddNorm {
                dtype,
                rows,
                width,
                has_delta,
                eps: 1e-6,
            };
            let inputs = [&x, &delta, &weight];
            let expected = make(&kernel, &inputs).unwrap();
            assert_eq!(
                bytes(&emulate(&kernel, &inputs)),
                bytes(&expected),
                "{dtype:?}"
            );
        }
        // More than one thread block, and the last not full.
        let [gate, up] = [4, 5].map(|seed| numbers((3, 101), seed, dtype));
        let shape = gate.shape().clone();
        let kernel = Swiglu { dtype, shape };
        let expected = make(&kernel, &[&gate, &up]).unwrap();
        assert_close(
            &emulate(&kernel, &[&gate, &up]),
            &expected,
            tolerance(dtype),
        );
    }
}

#[test]
fn rotations_are_their_twins() {
    if !emulator::has_compiler() {
        return;
    }
    for (dtype, head_dim) in [(DType::F32, 6), (DType::F64, 6), (DType::BF16, 128)] {
        let (tokens, heads) = (3, 5);
        let wide = if dtype == DType::F64 {
            dtype
        } else {
            DType::F32
        };
        let x = numbers((tokens, heads, head_dim), 1, dtype);
        let weight = numbers(head_dim, 2, dtype);
        let table = numbers((9, head_dim), 3, wide);
        let meta = Tensor::new(&[8_u32, 0, 4, 77], &Device::Cpu).unwrap();
        for has_norm in [true, false] {
            let kernel = Rotate {
                dtype,
                tokens,
                heads,
                head_dim,
                has_norm,
                eps: 1e-6,
            };
            let inputs = [&x, &weight, &table, &meta];
            let expected = make(&kernel, &inputs).unwrap();
            assert_eq!(
                bytes(&emulate(&kernel, &inputs)),
                bytes(&expected),
                "{dtype:?}"
            );
        }
    }
}

const LAYERS: usize = 2;

/// Runs `run` with the second of two passes over a cache: sequences of `history` tokens get `added` more.
fn with_cache<R>(
    shape: HeadShape,
    dtype: DType,
    sequences: &[(usize, usize)],
    run: impl FnOnce(&PagedRows<'_>, &PagedStep) -> candle_core::Result<R>,
) -> R {
    let mut cache = KvCache::paged(LAYERS, shape, dtype, 4096, &Device::Cpu);
    let rows: Vec<RowId> = sequences.iter().map(|_| cache.add_row()).collect();
    let mut pass =
        |start: &dyn Fn(usize) -> usize,
         len: &dyn Fn(usize) -> usize,
         run: &mut dyn FnMut(&PagedRows<'_>, &PagedStep) -> candle_core::Result<()>| {
            let mut batch = PackedBatch::new();
            for i in 0..sequences.len() {
                batch.push(&vec![0; len(i)], start(i));
            }
            let added: Vec<usize> = (0..sequences.len()).map(len).collect();
            cache
                .with_pages(&rows, &added, |paged| {
                    let step = PagedStep::new(&batch, paged, &Device::Cpu)?;
                    let width = (step.tokens, shape.kv_heads, shape.head_dim);
                    for layer in 0..LAYERS {
                        // Of a sequence's own, whatever stands beside it.
                        let [keys, values] = [0, 1].map(|kind| {
                            let parts: Vec<Tensor> = (0..sequences.len())
                                .map(|i| {
                                    let seed = 1000 * i.min(sequences.len()) + 10 * layer + kind;
                                    let all = (start(i) + len(i), width.1, width.2);
                                    numbers(all, seed, dtype)
                                        .narrow(0, start(i), len(i))
                                        .unwrap()
                                })
                                .collect();
                            Tensor::cat(&parts, 0).unwrap()
                        });
                        write_tokens(paged.pool().0, layer, &step, &keys, &values)?;
                    }
                    run(paged, &step)?;
                    Ok::<(), ModelError>(())
                })
                .unwrap();
        };
    pass(&|_| 0, &|i| sequences[i].0, &mut |_, _| Ok(()));
    let (mut run, mut result) = (Some(run), None);
    pass(
        &|i| sequences[i].0,
        &|i| sequences[i].1,
        &mut |rows, step| {
            result = Some(run.take().unwrap()(rows, step)?);
            Ok(())
        },
    );
    result.unwrap()
}

/// Returns attention without blocks, spans or running sums, in double precision.
fn plain_attention(
    shape: HeadShape,
    q: &[f64],
    keys: &[f64],
    values: &[f64],
    seen: usize,
) -> Vec<f64> {
    let mut output = Vec::new();
    for head in 0..shape.heads {
        let q = &q[head * shape.head_dim..][..shape.head_dim];
        let at = |key: usize| {
            (key * shape.kv_heads + head / (shape.heads / shape.kv_heads)) * shape.head_dim
        };
        let weights: Vec<f64> = (0..seen)
            .map(|key| {
                let key = &keys[at(key)..][..shape.head_dim];
                let dot: f64 = q.iter().zip(key).map(|(q, k)| q * k).sum();
                (dot / (shape.head_dim as f64).sqrt()).exp()
            })
            .collect();
        let total: f64 = weights.iter().sum();
        output.extend((0..shape.head_dim).map(|d| {
            let sum: f64 = (0..seen)
                .map(|key| weights[key] * values[at(key) + d])
                .sum();
            sum / total
        }));
    }
    output
}

#[rstest]
#[case(DType::F64, 4, 2, 6)]
#[case(DType::F32, 6, 2, 40)]
#[case(DType::BF16, 4, 4, 64)]
#[case(DType::BF16, 2, 1, 128)]
fn attention_is_its_twin(
    #[case] dtype: DType,
    #[case] heads: usize,
    #[case] kv_heads: usize,
    #[case] head_dim: usize,
) {
    let shape = HeadShape {
        heads,
        kv_heads,
        head_dim,
    };
    let has_compiler = emulator::has_compiler();
    // Single tokens; prompts and chunks of prompts beside them.
    for sequences in [
        &[(40, 1), (0, 1), (31, 1), (600, 1)][..],
        &[(0, 5), (40, 1), (300, 37), (0, 33), (256, 1)],
    ] {
        with_cache(shape, dtype, sequences, |rows, step| {
            let q = numbers((step.tokens, heads, head_dim), 7, dtype);
            let pool = rows.pool().0;
            let inputs = [&q, pool, &step.meta];
            for layer in 0..LAYERS {
                let mut kernel = Attend::new(step, dtype, layer);
                assert!(kernel.is_spread, "few and long sequences");
                let expected = make(&kernel, &inputs)?;
                let mut token = 0;
                for (i, &(history, added)) in sequences.iter().enumerate() {
                    let seed = 1000 * i + 10 * layer;
                    let all = (history + added, kv_heads, head_dim);
                    let read = |x: Tensor| -> Vec<f64> {
                        let x = x.to_dtype(DType::F64).unwrap();
                        x.flatten_all().unwrap().to_vec1().unwrap()
                    };
                    let [keys, values] = [0, 1].map(|kind| read(numbers(all, seed + kind, dtype)));
                    for offset in 0..added {
                        let q = read(q.get(token)?);
                        let plain =
                            plain_attention(shape, &q, &keys, &values, history + offset + 1);
                        let plain = Tensor::new(plain, &Device::Cpu)?;
                        assert_close(&expected.get(token)?, &plain, 10.0 * tolerance(dtype));
                        token += 1;
                    }
                }
                if has_compiler {
                    let spread = emulate(&kernel, &inputs);
                    assert_close(&spread, &expected, tolerance(dtype));
                    kernel.is_spread = false;
                    let whole = emulate(&kernel, &inputs);
                    assert_eq!(bytes(&whole), bytes(&spread), "spans are merged alike");
                }
            }
            Ok(())
        });
    }
}

/// A row's bits on the device do not depend on what is attended beside it, nor on how many of its tokens
/// are computed at a time.
#[test]
fn a_rows_attention_depends_on_nothing_beside_it() {
    if !emulator::has_compiler() {
        return;
    }
    let shape = HeadShape {
        heads: 4,
        kv_heads: 2,
        head_dim: 8,
    };
    let last_row = |sequences: &[(usize, usize)]| {
        with_cache(shape, DType::F32, sequences, |rows, step| {
            // The last token of the first sequence.
            let row = sequences[0].1 - 1;
            let query = numbers((1, 4, 8), 3, DType::F32);
            let zeros = Tensor::zeros((step.tokens, 4, 8), DType::F32, &Device::Cpu)?;
            let q = zeros.slice_assign(&[row..row + 1, 0..4, 0..8], &query)?;
            let kernel = Attend::new(step, DType::F32, 1);
            let found = emulate(&kernel, &[&q, rows.pool().0, &step.meta]);
            Ok(bytes(&found.get(row)?))
        })
    };
    let alone = last_row(&[(299, 1)]);
    assert_eq!(last_row(&[(200, 100)]), alone);
    assert_eq!(last_row(&[(0, 300)]), alone);
    assert_eq!(last_row(&[(299, 1), (1000, 1), (0, 50)]), alone);
}

#[test]
fn blocks_are_written_and_copied_as_by_their_twins() {
    if !emulator::has_compiler() {
        return;
    }
    let shape = HeadShape {
        heads: 2,
        kv_heads: 2,
        head_dim: 3,
    };
    for dtype in DTYPES {
        let layout = PoolLayout {
            layers: 2,
            blocks: 5,
            shape,
        };
        let fresh = || numbers((2, 2, 5, 32, 2, 3), 1, dtype);
        let check = |kernel: &dyn Kernel, inputs: &[&Tensor], expected: &Tensor| {
            let inputs = inputs.iter().map(|tensor| bytes(tensor)).collect();
            let found = emulator::run(&kernel.launches().unwrap(), bytes(&fresh()), 0, inputs);
            assert_ne!(bytes(expected), bytes(&fresh()));
            assert_eq!(found, bytes(expected), "{} {dtype:?}", kernel.name());
        };
        let pairs = Tensor::new(&[0_u32, 3, 4, 1], &Device::Cpu).unwrap();
        let expected = fresh();
        copy_blocks(&expected, layout, &[[0, 3], [4, 1]]).unwrap();
        check(
            &blocks::CopyBlocks::new(&expected, layout, 2),
            &[&pairs],
            &expected,
        );

        let step = PagedStep {
            // Two positions, then two slots.
            meta: Tensor::new(&[9_u32, 9, 70, 159], &Device::Cpu).unwrap(),
            layout,
            tokens: 2,
            slots_at: 2,
            tiles_at: 0,
            segments_at: 0,
            segments: 0,
            tiles: 0,
            rows: 1,
            spans: 1,
        };
        let [keys, values] = [5, 6].map(|seed| numbers((2, 2, 3), seed, dtype));
        let expected = fresh();
        write_tokens(&expected, 1, &step, &keys, &values).unwrap();
        let kernel = blocks::WriteTokens::new(&expected, &step, 1);
        check(&kernel, &[&keys, &values, &step.meta], &expected);
    }
}

#[test]
fn tokens_are_chosen_as_by_the_twin() {
    if !emulator::has_compiler() {
        return;
    }
    let (rows, vocab) = (4, 2500);
    let mut logits = numbers((rows, vocab), 1, DType::F32)
        .to_vec2::<f32>()
        .unwrap();
    logits[1][5] = f32::NEG_INFINITY;
    // Whole chunks without a weight.
    logits[2][..1100].fill(f32::NEG_INFINITY);
    logits[2][2100..].fill(-1e4);
    logits[3][2000] = f32::NAN;
    let logits = Tensor::new(logits, &Device::Cpu).unwrap();
    let mut targets = Vec::new();
    for row in 0..rows {
        for (temperature, uniform) in [
            (0.0, 0.0),
            (1.0, 0.0),
            (1.0, 0.999_999_999),
            (0.7, 0.3),
            (0.1, 0.81),
            (3.0, 0.55),
        ] {
            targets.push(Target {
                row,
                temperature,
                uniform,
            });
        }
    }
    let expected = sample(&logits, &targets).unwrap();
    assert!(expected[..18].iter().all(Option::is_some));
    assert!(expected[18..].iter().all(Option::is_none));
    let encoded: Vec<u32> = targets.iter().flat_map(Target::encode).collect();
    let encoded = Tensor::new(encoded, &Device::Cpu).unwrap();
    let kernel = Sample {
        targets: targets.len(),
        vocab,
    };
    let twin = make(&kernel, &[&logits, &encoded]).unwrap();
    assert_eq!(bytes(&emulate(&kernel, &[&logits, &encoded])), bytes(&twin));
}

#[test]
fn storage_of_another_type_is_refused() {
    let x = numbers((2, 4), 1, DType::F16);
    let error = add_norm(&x, None, &x.get(0).unwrap(), 1e-6).unwrap_err();
    assert!(
        error.to_string().contains("load them in bf16 or f32"),
        "{error}"
    );
    assert!(matches!(&*x.storage_and_layout().0, Storage::Cpu(_)));
}
