use super::*;

fn fill(len: usize, seed: u64) -> Vec<f64> {
    let mut state = seed;
    (0..len)
        .map(|_| {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1);
            (state >> 40) as f64 / f64::from(1 << 24) * 2.0 - 1.0
        })
        .collect()
}

/// Histories of segments that continue none.
fn roots(segments: &[Range<usize>]) -> Vec<Vec<Range<usize>>> {
    vec![Vec::new(); segments.len()]
}

/// The definition, one query and one head at a time.
fn reference(
    q: &[f64],
    k: &[f64],
    v: &[f64],
    segments: &[Range<usize>],
    shape: HeadShape,
) -> Vec<f64> {
    let (width, key_width, dim) = (shape.query_width(), shape.key_width(), shape.head_dim);
    let mut output = vec![0.0; q.len()];
    for segment in segments {
        for t in segment.clone() {
            for head in 0..shape.heads {
                let kv = head / shape.group();
                let scores: Vec<f64> = (segment.start..=t)
                    .map(|j| {
                        (0..dim)
                            .map(|d| {
                                q[t * width + head * dim + d] * k[j * key_width + kv * dim + d]
                            })
                            .sum::<f64>()
                            * shape.scale()
                    })
                    .collect();
                let max = scores.iter().copied().fold(f64::MIN, f64::max);
                let total: f64 = scores.iter().map(|s| (s - max).exp()).sum();
                for (offset, score) in scores.iter().enumerate() {
                    let p = (score - max).exp() / total;
                    let j = segment.start + offset;
                    for d in 0..dim {
                        output[t * width + head * dim + d] += p * v[j * key_width + kv * dim + d];
                    }
                }
            }
        }
    }
    output
}

#[test]
fn attention_matches_its_definition() {
    for (heads, kv_heads, head_dim) in [(2, 1, 4), (6, 2, 32), (5, 5, 20), (14, 2, 16)] {
        let shape = HeadShape {
            heads,
            kv_heads,
            head_dim,
        };
        let segments = [0..3, 3..3, 3..4, 4..74, 74..171];
        let n = 171;
        let q = fill(n * shape.query_width(), 1);
        let k = fill(n * shape.key_width(), 2);
        let v = fill(n * shape.key_width(), 3);
        let source = PackedKeyValues {
            keys: &k,
            values: &v,
            segments: &segments,
            histories: &roots(&segments),
            shape,
        };
        let found = attend(&q, &segments, shape, &source);
        let expected = reference(&q, &k, &v, &segments, shape);
        for (found, expected) in found.output.iter().zip(&expected) {
            assert!((found - expected).abs() < 1e-12, "{found} {expected}");
        }
    }
}

#[test]
fn a_query_has_the_same_bits_alone_and_in_company() {
    let shape = HeadShape {
        heads: 6,
        kv_heads: 2,
        head_dim: 32,
    };
    #[expect(clippy::cast_possible_truncation, reason = "rounds on purpose")]
    let to_f32 = |values: Vec<f64>| values.into_iter().map(|v| v as f32).collect::<Vec<_>>();
    let n = 90;
    let q = to_f32(fill(n * shape.query_width(), 1));
    let k = to_f32(fill(n * shape.key_width(), 2));
    let v = to_f32(fill(n * shape.key_width(), 3));
    let whole = 0..n;
    let all = attend(
        &q,
        std::slice::from_ref(&whole),
        shape,
        &PackedKeyValues {
            keys: &k,
            values: &v,
            segments: std::slice::from_ref(&whole),
            histories: &[vec![]],
            shape,
        },
    );
    for length in [1, 2, 31, 32, 33, 64, 65, 89] {
        let short = 0..length;
        let some = attend(
            &q,
            std::slice::from_ref(&short),
            shape,
            &PackedKeyValues {
                keys: &k,
                values: &v,
                segments: std::slice::from_ref(&short),
                histories: &[vec![]],
                shape,
            },
        );
        let width = shape.query_width();
        assert_eq!(some.output[..], all.output[..length * width], "{length}");
    }
}

#[test]
fn gradients_match_finite_differences() {
    let shape = HeadShape {
        heads: 4,
        kv_heads: 2,
        head_dim: 6,
    };
    let segments = [0..2, 2..9];
    let n = 9;
    let inputs = [
        fill(n * shape.query_width(), 1),
        fill(n * shape.key_width(), 2),
        fill(n * shape.key_width(), 3),
    ];
    let dout = fill(n * shape.query_width(), 4);
    let loss = |[q, k, v]: &[Vec<f64>; 3]| {
        let output = reference(q, k, v, &segments, shape);
        output.iter().zip(&dout).map(|(o, d)| o * d).sum::<f64>()
    };
    let [q, k, v] = &inputs;
    let source = PackedKeyValues {
        keys: k,
        values: v,
        segments: &segments,
        histories: &roots(&segments),
        shape,
    };
    let forward = attend(q, &segments, shape, &source);
    let gradients = attend_backward(q, &source, &forward.log_sum_exp, &dout);
    let step = 1e-6;
    for (which, gradient) in [gradients.queries, gradients.keys, gradients.values]
        .iter()
        .enumerate()
    {
        for i in 0..gradient.len() {
            let shifted = |by: f64| {
                let mut inputs = inputs.clone();
                inputs[which][i] += by;
                loss(&inputs)
            };
            let slope = (shifted(step) - shifted(-step)) / (2.0 * step);
            assert!(
                (slope - gradient[i]).abs() < 1e-7,
                "{which} {i}: {slope} {}",
                gradient[i]
            );
        }
    }
}

#[test]
fn a_sequence_longer_than_a_tile_has_the_same_gradient_as_its_definition() {
    let shape = HeadShape {
        heads: 2,
        kv_heads: 1,
        head_dim: 4,
    };
    let n = 2 * backward::QUERIES_PER_TILE + 20;
    let whole = 0..n;
    let segments = std::slice::from_ref(&whole);
    let inputs = [
        fill(n * shape.query_width(), 1),
        fill(n * shape.key_width(), 2),
        fill(n * shape.key_width(), 3),
    ];
    let dout = fill(n * shape.query_width(), 4);
    let [q, k, v] = &inputs;
    let source = PackedKeyValues {
        keys: k,
        values: v,
        segments,
        histories: &roots(segments),
        shape,
    };
    let forward = attend(q, segments, shape, &source);
    let gradients = attend_backward(q, &source, &forward.log_sum_exp, &dout);
    // Directional derivatives, one an input: a full check would take n^3 products.
    let found = [gradients.queries, gradients.keys, gradients.values];
    for which in 0..3 {
        let direction = fill(inputs[which].len(), 9 + which as u64);
        let loss = |by: f64| {
            let mut inputs = inputs.clone();
            for (value, direction) in inputs[which].iter_mut().zip(&direction) {
                *value += by * direction;
            }
            let output = reference(&inputs[0], &inputs[1], &inputs[2], segments, shape);
            output.iter().zip(&dout).map(|(o, d)| o * d).sum::<f64>()
        };
        let slope = (loss(1e-6) - loss(-1e-6)) / 2e-6;
        let expected: f64 = found[which]
            .iter()
            .zip(&direction)
            .map(|(g, d)| g * d)
            .sum();
        assert!(
            (slope - expected).abs() < 1e-6 * (1.0 + expected.abs()),
            "{which}"
        );
    }
}
