//! Log-probabilities of chosen tokens, and the gradient through the output head.
//!
//! The logits of all tokens are never held at once (Qwen3's vocabulary would take 600 kB a token):
//! rows go through the head in chunks, and only rows that predict a token of the loss go at all. The
//! backward pass turns a chunk's logits into their gradient in place while they are at hand, since a
//! token's coefficient depends on its own log-probability alone.

use candle_core::{D, DType, Tensor};

use super::TrainerError;
use crate::engine::model::ops::{
    self, Buffer, Matrix, PackedRows, Real, RowLoss, RowPairs, RowStatistics, Term, TermRows,
    Values, Write, log_softmax_gradient, row_statistics,
};
use crate::engine::model::{Adapters, Decoder, GradientReal, Gradients, Parameter};

/// Logits held at a time: 4 MB of `f32`, about an L2 cache.
const CHUNK_LOGITS: usize = 1 << 20;

/// Fewest rows of a chunk: the head's weights are read once for each.
const MIN_CHUNK_ROWS: usize = 256;

/// Tokens of the vocabulary whose logits' gradients are packed at a time.
const PACKED_TOKENS: usize = 4096;

/// Returns how many rows go through the output head at a time.
pub(super) fn head_chunk_rows(vocab_size: usize) -> usize {
    (CHUNK_LOGITS / vocab_size).max(MIN_CHUNK_ROWS)
}

/// Tokens to score, and where: `tokens[i]` is predicted by token `positions[i]` of the packed batch.
///
/// Token `t` of a sequence is predicted by token `t - 1`: the first token of a completion by the last
/// token of its prompt.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Targets {
    /// Rows of the hidden states. One may stand here more than once, where sequences part.
    pub positions: Vec<usize>,
    /// Tokens predicted there.
    pub tokens: Vec<u32>,
}

impl Targets {
    /// Returns the number of targets.
    pub fn len(&self) -> usize {
        self.positions.len()
    }

    /// Returns whether there are no targets.
    pub fn is_empty(&self) -> bool {
        self.positions.is_empty()
    }

    fn check(&self, rows: usize, vocab: usize) -> Result<(), TrainerError> {
        if self.positions.len() != self.tokens.len() {
            return Err(TrainerError::Length {
                what: "positions against tokens of the targets",
                found: self.positions.len(),
                expected: self.tokens.len(),
            });
        }
        if let Some(&position) = self.positions.iter().find(|&&position| position >= rows) {
            return Err(TrainerError::Length {
                what: "position of a target against hidden states",
                found: position,
                expected: rows,
            });
        }
        if let Some(&token) = self.tokens.iter().find(|&&token| token as usize >= vocab) {
            let error = crate::engine::model::ModelError::TokenOutOfRange {
                token,
                vocab_size: vocab,
            };
            return Err(error.into());
        }
        Ok(())
    }
}

/// What the model says about each target.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Scores {
    /// Log-probabilities under the tempered distribution. Of an `f32` model they are exact `f32`
    /// values.
    pub logprobs: Vec<f64>,
    /// Entropies of the tempered distribution, in nats.
    pub entropies: Vec<f64>,
}

/// Returns each target's log-probability with logits divided by `temperature`, from hidden states
/// `[n, hidden]` that were computed with or without adapters, as the head then is.
///
/// # Errors
///
/// Fails if a target is out of range, if the temperature is not positive, or if the tensor library
/// fails.
pub fn score(
    decoder: &Decoder,
    hidden: &Tensor,
    targets: &Targets,
    adapters: Adapters,
    temperature: f64,
) -> Result<Scores, TrainerError> {
    let inverse = check(decoder, hidden, targets, temperature)?;
    let mut head = Pass {
        decoder,
        head: decoder.head(adapters),
        targets,
        inverse,
        gradients: None,
    };
    let nothing = HeadLoss {
        coefficient: &|_, _| 0.0,
        entropy: 0.0,
    };
    Ok(head.run(hidden, nothing)?.0)
}

/// Returns each target's scores and the gradient `[n, hidden]` of the loss with respect to the hidden
/// states; adds that of the head's weights to `gradients` if they are trained.
///
/// # Errors
///
/// As for [`score`].
pub fn backward_through_head(
    decoder: &Decoder,
    hidden: &Tensor,
    targets: &Targets,
    temperature: f64,
    gradients: &mut Gradients,
    loss: HeadLoss<'_>,
) -> Result<(Scores, Tensor), TrainerError> {
    let inverse = check(decoder, hidden, targets, temperature)?;
    let mut head = Pass {
        decoder,
        head: decoder.head(Adapters::On),
        targets,
        inverse,
        gradients: Some(gradients),
    };
    let (scores, dhidden) = head.run(hidden, loss)?;
    let dhidden = dhidden.map_or_else(|| hidden.zeros_like(), Ok)?;
    Ok((scores, dhidden))
}

fn check(
    decoder: &Decoder,
    hidden: &Tensor,
    targets: &Targets,
    temperature: f64,
) -> Result<f64, TrainerError> {
    let (rows, width) = hidden.dims2()?;
    if width != decoder.config().hidden_size {
        return Err(TrainerError::Length {
            what: "width of the hidden states",
            found: width,
            expected: decoder.config().hidden_size,
        });
    }
    targets.check(rows, decoder.config().vocab_size)?;
    if !(temperature > 0.0 && temperature.is_finite()) {
        // Greedy sampling has no distribution to train on.
        let reason = format!("{temperature} is not positive");
        return Err(TrainerError::InvalidConfig {
            field: "temperature",
            reason,
        });
    }
    Ok(1.0 / temperature)
}

/// How the loss depends on what the head says.
#[derive(Clone, Copy)]
pub struct HeadLoss<'a> {
    /// Returns the derivative of the loss with respect to the log-probability of a target, given its
    /// index and log-probability. Called once for each target.
    pub coefficient: &'a (dyn Fn(usize, f64) -> f64 + Sync),
    /// The derivative with respect to the entropy of each target's distribution.
    pub entropy: f64,
}

impl std::fmt::Debug for HeadLoss<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("HeadLoss")
            .field("entropy", &self.entropy)
            .finish_non_exhaustive()
    }
}

/// One visit to the output head.
struct Pass<'a> {
    decoder: &'a Decoder,
    head: &'a Parameter,
    targets: &'a Targets,
    inverse: f64,
    gradients: Option<&'a mut Gradients>,
}

impl Pass<'_> {
    fn run(
        &mut self,
        hidden: &Tensor,
        loss: HeadLoss<'_>,
    ) -> Result<(Scores, Option<Tensor>), TrainerError> {
        match (self.decoder.is_fused(), self.decoder.dtype()) {
            (true, DType::F64) => self.fused::<f64>(hidden, loss),
            (true, _) => self.fused::<f32>(hidden, loss),
            (false, _) => self.composed(hidden, loss),
        }
    }

    fn chunk_rows(&self) -> usize {
        head_chunk_rows(self.decoder.config().vocab_size)
    }

    fn fused<T: GradientReal>(
        &mut self,
        hidden: &Tensor,
        loss: HeadLoss<'_>,
    ) -> Result<(Scores, Option<Tensor>), TrainerError> {
        let config = self.decoder.config();
        let (vocab, width) = (config.vocab_size, config.hidden_size);
        let head = self.head;
        let weight = head.panels::<T>()?;
        let shape = hidden.shape().clone();
        let hidden = hidden.contiguous()?;
        let hidden = Values::<T>::of(&hidden)?;
        let inverse = T::from_f64(self.inverse);
        let mut scores = Scores::default();
        let mut dhidden = self
            .gradients
            .is_some()
            .then(|| vec![T::ZERO; hidden.len()]);
        let chunk = self.chunk_rows();
        let mut logits = Buffer::new(chunk.min(self.targets.len()) * vocab);
        let chunks = self
            .targets
            .positions
            .chunks(chunk)
            .zip(self.targets.tokens.chunks(chunk));
        for (index, (positions, tokens)) in chunks.enumerate() {
            let rows = positions.len();
            let mut chosen = Vec::with_capacity(rows * width);
            for &position in positions {
                chosen.extend_from_slice(&hidden[position * width..(position + 1) * width]);
            }
            let logits = &mut logits[..rows * vocab];
            ops::linear(T::ONE, &chosen, rows, &weight, Write::Replace, logits);
            let statistics = row_statistics(logits, tokens, inverse);
            scores.extend(&statistics);
            let (Some(gradients), Some(dhidden)) = (&mut self.gradients, &mut dhidden) else {
                continue;
            };
            let coefficients: Vec<T> = (statistics.iter().enumerate())
                .map(|(row, statistics)| {
                    let target = index * chunk + row;
                    T::from_f64((loss.coefficient)(target, statistics.logprob.to_f64()))
                })
                .collect();
            let entropy = T::from_f64(loss.entropy);
            if weight.takes_pairs() {
                // Frozen, as all such weights are: the gradient is read in pairs only.
                let dlogits = RowPairs::with(
                    rows,
                    vocab,
                    #[inline(always)]
                    |row, gradient| {
                        let loss = RowLoss {
                            target: tokens[row] as usize,
                            statistics: statistics[row],
                            coefficient: coefficients[row],
                            entropy,
                            inverse_temperature: inverse,
                        };
                        loss.write_gradient(&logits[row * vocab..][..vocab], gradient);
                    },
                );
                let term = Term::new(T::ONE, &dlogits, &weight);
                ops::linears_backward(&[term], Write::Replace, &mut chosen);
            } else {
                log_softmax_gradient(logits, tokens, &statistics, &coefficients, entropy, inverse);
                if let Some(slot) = head.slot() {
                    let dlogits = Matrix::new(logits, rows, vocab);
                    let chosen = Matrix::new(&chosen, rows, width);
                    let sums = T::sums(gradients, slot);
                    ops::matmul(T::ONE, dlogits.t(), chosen, Write::Add, sums, width, true);
                }
                for first in (0..vocab).step_by(PACKED_TOKENS) {
                    let outputs = first..vocab.min(first + PACKED_TOKENS);
                    let dy = PackedRows::new(logits, rows, outputs.clone(), vocab);
                    let term = Term {
                        alpha: T::ONE,
                        dy: TermRows::from(&dy),
                        weight: &weight,
                        outputs,
                    };
                    let write = if first == 0 {
                        Write::Replace
                    } else {
                        Write::Add
                    };
                    ops::linears_backward(&[term], write, &mut chosen);
                }
            }
            for (&position, row) in positions.iter().zip(chosen.chunks_exact(width)) {
                let dhidden = &mut dhidden[position * width..(position + 1) * width];
                for (sum, &value) in dhidden.iter_mut().zip(row) {
                    *sum += value;
                }
            }
        }
        let dhidden = dhidden
            .map(|values| ops::into_tensor(values, shape))
            .transpose()?;
        Ok((scores, dhidden))
    }

    fn composed(
        &mut self,
        hidden: &Tensor,
        loss: HeadLoss<'_>,
    ) -> Result<(Scores, Option<Tensor>), TrainerError> {
        let device = self.decoder.device();
        let head = self.head;
        let weight = head.tensor().detach();
        let wide = if weight.dtype() == DType::F64 {
            DType::F64
        } else {
            DType::F32
        };
        let mut scores = Scores::default();
        let mut dhidden = match self.gradients {
            Some(_) => Some(hidden.zeros_like()?),
            None => None,
        };
        let chunk = self.chunk_rows();
        let chunks = self
            .targets
            .positions
            .chunks(chunk)
            .zip(self.targets.tokens.chunks(chunk));
        for (index, (positions, tokens)) in chunks.enumerate() {
            let positions = Tensor::new(to_u32(positions), device)?;
            let tokens = Tensor::new(tokens, device)?.unsqueeze(1)?;
            let chosen = hidden.index_select(&positions, 0)?.detach();
            // A head that is trained beside a narrow base is wide.
            let chosen = chosen.to_dtype(weight.dtype())?;
            let logits = (chosen.matmul(&weight.t()?)?.to_dtype(wide)? * self.inverse)?;
            let max = logits.max_keepdim(D::Minus1)?;
            let shifted = logits.broadcast_sub(&max)?;
            let powers = shifted.exp()?;
            let sum = powers.sum_keepdim(D::Minus1)?;
            let probabilities = powers.broadcast_div(&sum)?;
            let log_sum = sum.log()?;
            let logprobs = (shifted.gather(&tokens, 1)? - &log_sum)?;
            let mean = (&probabilities * &shifted)?.sum_keepdim(D::Minus1)?;
            let entropies = (&log_sum - mean)?;
            let read = |x: &Tensor| x.flatten_all()?.to_dtype(DType::F64)?.to_vec1::<f64>();
            let logprobs = read(&logprobs)?;
            scores.entropies.extend(read(&entropies)?);
            if let (Some(gradients), Some(sum)) = (&mut self.gradients, &mut dhidden) {
                let coefficients: Vec<f64> = (logprobs.iter().enumerate())
                    .map(|(row, &logprob)| {
                        (loss.coefficient)(index * chunk + row, logprob) * self.inverse
                    })
                    .collect();
                let coefficients = Tensor::new(coefficients, device)?
                    .to_dtype(wide)?
                    .unsqueeze(1)?;
                let spread = probabilities.broadcast_mul(&coefficients)?.neg()?;
                let mut dlogits = spread.scatter_add(&tokens, &coefficients, 1)?;
                if loss.entropy != 0.0 {
                    let surprise = shifted.broadcast_sub(&log_sum)?.broadcast_add(&entropies)?;
                    let scale = -loss.entropy * self.inverse;
                    dlogits = (dlogits + ((&probabilities * surprise)? * scale)?)?;
                }
                let dlogits = dlogits.to_dtype(weight.dtype())?;
                if let Some(slot) = head.slot() {
                    gradients.add_tensor(slot, &dlogits.t()?.contiguous()?.matmul(&chosen)?)?;
                }
                let dchosen = dlogits.matmul(&weight)?.to_dtype(sum.dtype())?;
                *sum = sum.index_add(&positions, &dchosen, 0)?;
            }
            scores.logprobs.extend(logprobs);
        }
        Ok((scores, dhidden))
    }
}

impl Scores {
    fn extend<T: Real>(&mut self, statistics: &[RowStatistics<T>]) {
        self.logprobs
            .extend(statistics.iter().map(|row| row.logprob.to_f64()));
        self.entropies
            .extend(statistics.iter().map(|row| row.entropy.to_f64()));
    }
}

fn to_u32(positions: &[usize]) -> Vec<u32> {
    let narrow = |&position| u32::try_from(position).expect("a batch has fewer than 2^32 tokens");
    positions.iter().map(narrow).collect()
}
