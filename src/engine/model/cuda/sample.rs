//! Choosing tokens where the logits are.

use candle_core::{CpuStorage, DType, Shape, Tensor};
use rayon::prelude::*;

use super::{Input, Kernel, Launch, Make, Operand, Scalar, Source, Variant, WARP, make, values};

const SOURCE: Source = Source {
    name: "sample",
    text: include_str!("sample.cu"),
    functions: &["sample"],
};

/// Threads of a row, and tokens whose weights are summed together.
const SAMPLERS: usize = 1024;

/// Sums of so many tokens that a row may have.
const MAX_CHUNKS: usize = 1024;

/// Stands for a token where logits are not finite.
const NO_TOKEN: u32 = u32::MAX;

/// What is chosen from one row of logits.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Target {
    /// Row of the logits.
    pub(crate) row: usize,
    /// 0 takes the likeliest token.
    pub(crate) temperature: f32,
    /// A number in [0, 1) that the token is drawn by.
    pub(crate) uniform: f64,
}

impl Target {
    /// Returns the target as the kernel reads it.
    #[expect(
        clippy::cast_possible_truncation,
        reason = "both halves are taken, and logits of 2^32 rows fit no memory"
    )]
    pub(super) fn encode(&self) -> [u32; 4] {
        let bits = self.uniform.to_bits();
        [
            self.row as u32,
            self.temperature.to_bits(),
            bits as u32,
            (bits >> 32) as u32,
        ]
    }
}

/// Chooses a token for each target from `logits` `[rows, vocab]`; returns it with its
/// log-probability at the temperature (1 for greedy), or `None` where logits are not finite.
pub(crate) fn sample(
    logits: &Tensor,
    targets: &[Target],
) -> candle_core::Result<Vec<Option<(u32, f32)>>> {
    let (rows, vocab) = logits.dims2()?;
    if vocab > SAMPLERS * MAX_CHUNKS {
        candle_core::bail!("a vocabulary of {vocab} > {} tokens", SAMPLERS * MAX_CHUNKS)
    }
    let kernel = Sample {
        targets: targets.len(),
        vocab,
    };
    let mut encoded = Vec::with_capacity(4 * targets.len());
    for target in targets {
        if target.row >= rows {
            candle_core::bail!("row {} of {rows} rows of logits", target.row)
        }
        encoded.extend(target.encode());
    }
    let encoded = Tensor::new(encoded, logits.device())?;
    let logits = logits.to_dtype(DType::F32)?.contiguous()?;
    let chosen = make(&kernel, &[&logits, &encoded])?;
    let chosen = chosen.to_vec1::<u32>()?;
    let pairs = chosen.chunks_exact(2).map(|pair| {
        let is_token = pair[0] != NO_TOKEN;
        is_token.then(|| (pair[0], f32::from_bits(pair[1])))
    });
    Ok(pairs.collect())
}

pub(super) struct Sample {
    pub(super) targets: usize,
    pub(super) vocab: usize,
}

impl Kernel for Sample {
    fn name(&self) -> &'static str {
        "sample"
    }

    fn launches(&self) -> candle_core::Result<Vec<Launch>> {
        Ok(vec![Launch {
            source: SOURCE,
            variant: Variant {
                dtype: DType::F32,
                defines: Vec::new(),
            },
            function: "sample",
            grid: [self.targets, 1, 1],
            threads: SAMPLERS,
            shared_bytes: 0,
            operands: vec![Operand::Target, Operand::Input(0), Operand::Input(1)],
            scalars: vec![Scalar::u32(self.vocab)?],
        }])
    }
}

impl Make for Sample {
    fn shape(&self) -> Shape {
        Shape::from(2 * self.targets)
    }

    fn dtype(&self) -> DType {
        DType::U32
    }

    fn twin(&self, inputs: &[Input<'_>]) -> candle_core::Result<CpuStorage> {
        let (logits, targets) = (values::<f32>(&inputs[0])?, values::<u32>(&inputs[1])?);
        let chosen = targets.par_chunks_exact(4).flat_map_iter(|target| {
            let row = &logits[target[0] as usize * self.vocab..][..self.vocab];
            let uniform = u64::from(target[3]) << 32 | u64::from(target[2]);
            choose(row, f32::from_bits(target[1]), f64::from_bits(uniform))
                .map_or([NO_TOKEN, 0], |(token, logprob)| [token, logprob.to_bits()])
        });
        Ok(CpuStorage::U32(chosen.collect()))
    }
}

/// Chooses a token of one row.
fn choose(logits: &[f32], asked: f32, uniform: f64) -> Option<(u32, f32)> {
    let is_greedy = asked == 0.0;
    let temperature = if is_greedy { 1.0 } else { asked };
    let mut best = 0;
    for (token, &logit) in logits.iter().enumerate() {
        if logit.is_nan() || logit == f32::INFINITY {
            return None;
        }
        if logit > logits[best] {
            best = token;
        }
    }
    let max = *logits.get(best).filter(|max| max.is_finite())?;
    let weight = |logit: f32| narrow(f64::from((logit - max) / temperature).exp());
    let sums: Vec<f64> = logits
        .chunks(SAMPLERS)
        .map(|chunk| {
            let mut lanes = [0.0; WARP];
            for (i, &logit) in chunk.iter().enumerate() {
                lanes[i % WARP] += f64::from(weight(logit));
            }
            super::warp_sum(lanes)
        })
        .collect();
    let total: f64 = sums.iter().sum();
    let token = if is_greedy {
        best
    } else {
        let threshold = uniform * total;
        let (mut chunk, mut before, mut sum) = (0, 0.0, 0.0);
        for (index, &part) in sums.iter().enumerate() {
            if part == 0.0 {
                continue;
            }
            (chunk, before) = (index, sum);
            sum += part;
            if sum > threshold {
                break;
            }
        }
        let first = chunk * SAMPLERS;
        let (mut sum, mut last) = (before, first);
        for (token, &logit) in logits.iter().enumerate().skip(first).take(SAMPLERS) {
            let weight = weight(logit);
            if weight == 0.0 {
                continue;
            }
            sum += f64::from(weight);
            last = token;
            if sum > threshold {
                break;
            }
        }
        last
    };
    let scaled = f64::from((logits[token] - max) / temperature);
    Some((u32::try_from(token).ok()?, narrow(scaled - total.ln())))
}

#[expect(
    clippy::cast_possible_truncation,
    reason = "weights and log-probabilities are f32"
)]
fn narrow(value: f64) -> f32 {
    value as f32
}
