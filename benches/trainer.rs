//! Training and decoding of the tiny model on the CPU, and LoRA steps of SmolLM2.
//!
//!     cargo bench --bench trainer                 criterion's report
//!     cargo bench --bench trainer -- measure      answers requests; see scripts/compare/trainer.py
//!
//! The tiny model is a Qwen3 of 1.6 million weights; a step is 256 sequences of 110 tokens. What is
//! measured for the comparison has the weights of the GGUF file that `WARDIAN_SMOLLM2_GGUF` names.
#![allow(missing_docs, reason = "criterion's macros")]
#![allow(clippy::print_stdout, reason = "what it is for")]

use std::collections::BTreeMap;
use std::io::BufRead as _;
use std::time::Instant;

use candle_core::{DType, Device};
use criterion::{Criterion, Throughput};
use serde_json::{Value, json};
use wardian::engine::LoadedModel;
use wardian::engine::model::{
    Decoder, LoraConfig, ModelConfig, ModelType, PackedBatch, RopeScaling, Trainable, WeightFormat,
    random_weights,
};
use wardian::trainer::{
    AdamW, AdamWConfig, LossConfig, MicroBatch, PassConfig, TrainSequence, accumulate_nll_gradient,
    accumulate_policy_gradient, pack,
};

const SEQUENCES: usize = 256;
const LENGTH: usize = 110;
const PROMPT: usize = 50;

fn tiny() -> ModelConfig {
    ModelConfig {
        model_type: ModelType::Qwen3,
        vocab_size: 512,
        hidden_size: 192,
        intermediate_size: 512,
        num_hidden_layers: 4,
        num_attention_heads: 6,
        num_key_value_heads: 2,
        head_dim: 32,
        max_position_embeddings: 512,
        rms_norm_eps: 1e-6,
        rope_theta: 10_000.0,
        rope_scaling: RopeScaling::Default,
        attention_bias: false,
        mlp_bias: false,
        tie_word_embeddings: true,
        bos_token_id: None,
        eos_token_id: vec![0],
    }
}

fn decoder(trainable: &Trainable) -> Decoder {
    let config = tiny();
    let weights =
        random_weights(&config, 1, DType::F32, &Device::Cpu).expect("the configuration is valid");
    Decoder::new(config, weights, &Device::Cpu, trainable, 1).expect("the weights fit")
}

/// Returns a sequence whose first tokens it shares with the others of its group.
fn tokens(sequence: usize, group: usize) -> Vec<u32> {
    (0..LENGTH)
        .map(|t| {
            (
                if t < PROMPT {
                    sequence / group * group
                } else {
                    sequence
                },
                t,
            )
        })
        .map(|(source, t)| u32::try_from((source * 7919 + t * 104_729) % 512).unwrap_or(0))
        .collect()
}

fn sequences(group: usize) -> Vec<TrainSequence> {
    (0..SEQUENCES)
        .map(|i| TrainSequence {
            tokens: tokens(i, group),
            loss_mask: (0..LENGTH).map(|t| t >= PROMPT).collect(),
            logprobs: vec![-6.24; LENGTH],
            reference: None,
            advantage: if i % 2 == 0 { 1.0 } else { -1.0 },
            credit: None,
        })
        .collect()
}

fn training(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("train");
    group
        .sample_size(10)
        .throughput(Throughput::Elements((SEQUENCES * LENGTH) as u64));
    let config = LossConfig::default();
    let full = decoder(&Trainable::Full);
    let lora = decoder(&Trainable::Lora(LoraConfig::default()));
    for (name, decoder, samples, budget, recompute) in [
        ("full", &full, 1, 1024, false),
        ("full", &full, 1, 2048, false),
        ("full", &full, 1, 4096, false),
        ("full, recomputed", &full, 1, 2048, true),
        ("full, 8 samples of a prompt", &full, 8, 2048, false),
        ("lora", &lora, 1, 2048, false),
        ("lora, 8 samples of a prompt", &lora, 8, 2048, false),
    ] {
        let sequences = sequences(samples);
        let totals = config.totals(sequences.iter().map(TrainSequence::trainable_tokens));
        let micro = pack(&sequences, budget, &config, totals).expect("the masks fit");
        let mut gradients = decoder.zero_gradients();
        let pass = PassConfig {
            recompute,
            ..PassConfig::default()
        };
        group.bench_function(format!("{name}, {budget} tokens at a time"), |bencher| {
            bencher.iter(|| {
                gradients.clear();
                for micro in &micro {
                    accumulate_policy_gradient(decoder, micro, &config, pass, &mut gradients)
                        .expect("the batch fits the model");
                }
            });
        });
    }
    for (name, decoder) in [("full", &full), ("lora", &lora)] {
        let mut optimizer =
            AdamW::new(decoder, AdamWConfig::default()).expect("the settings are valid");
        let gradients = decoder.zero_gradients();
        group.bench_function(format!("{name}, adamw"), |bencher| {
            bencher.iter(|| {
                optimizer
                    .step(decoder, &gradients, 1e-4)
                    .expect("zeros are finite")
            });
        });
    }
    group.finish();
}

fn decoding(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("decode");
    group.sample_size(10);
    let decoder = decoder(&Trainable::Full);
    for rows in [1, 16, 256] {
        group.throughput(Throughput::Elements(rows as u64));
        group.bench_function(format!("{rows} rows at 80 tokens"), |bencher| {
            let mut cache = decoder.new_cache(1 << 20);
            let ids: Vec<_> = (0..rows).map(|_| cache.add_row()).collect();
            let prompts =
                PackedBatch::from_sequences((0..rows).map(|i| tokens(i, 1)[..80].to_vec()));
            decoder
                .hidden_cached(&prompts, &mut cache, &ids)
                .expect("the batch fits the model");
            let mut step = PackedBatch::new();
            for _ in 0..rows {
                step.push(&[3], 80);
            }
            bencher.iter(|| {
                let hidden = decoder
                    .hidden_cached(&step, &mut cache, &ids)
                    .expect("the batch fits the model");
                let logits = decoder.logits(&hidden).expect("the width fits");
                for &id in &ids {
                    cache.truncate(id, 80).expect("the row exists");
                }
                logits
            });
        });
    }
    group.finish();
}

/// What the base of the comparison's steps is kept and multiplied in.
const FORMATS: [WeightFormat; 2] = [WeightFormat::Wide, WeightFormat::Bf16Products];

/// A LoRA step of the comparison.
struct Step {
    decoder: Decoder,
    optimizer: AdamW,
    sequences: Vec<TrainSequence>,
    budget: usize,
    recompute: bool,
}

impl Step {
    /// Takes sequences of the same tokens as the comparison's other program, the first of `prompt`
    /// tokens of each not in the loss.
    fn new(request: &Value) -> Self {
        let number = |key: &str| {
            let value = request[key].as_u64().unwrap_or(0);
            usize::try_from(value).expect("requests are small")
        };
        let path = std::env::var("WARDIAN_SMOLLM2_GGUF").expect("the weights are named");
        let model = LoadedModel::open(&path, DType::F32, &Device::Cpu)
            .unwrap_or_else(|error| panic!("{path}: {error}"));
        let config = LoraConfig {
            rank: number("rank"),
            alpha: 2.0 * number("rank") as f64,
            ..LoraConfig::default()
        };
        let trainable = Trainable::Lora(config);
        let format = FORMATS
            .into_iter()
            .find(|format| request["setting"] == format.name());
        let format = format.unwrap_or_default();
        let (config, weights) = (model.config, model.weights);
        let decoder = Decoder::with_format(config, weights, &Device::Cpu, &trainable, 1, format)
            .expect("the weights fit");
        let optimizer =
            AdamW::new(&decoder, AdamWConfig::default()).expect("the settings are valid");
        let (length, prompt) = (number("length"), number("prompt"));
        let token = |index, t| u32::try_from((index * 7919 + t * 104_729) % 49_152).unwrap_or(0);
        let sequences = (0..number("sequences"))
            .map(|index| TrainSequence {
                tokens: (0..length).map(|t| token(index, t)).collect(),
                loss_mask: (0..length).map(|t| t >= prompt).collect(),
                logprobs: vec![-10.0; length],
                reference: None,
                advantage: if index % 2 == 0 { 1.0 } else { -1.0 },
                credit: None,
            })
            .collect();
        Self {
            decoder,
            optimizer,
            sequences,
            budget: number("micro_batch_tokens"),
            recompute: request["recompute"].as_bool().unwrap_or(false),
        }
    }

    /// Runs forward, backward and update once.
    fn run(&mut self) -> Value {
        let start = Instant::now();
        let config = LossConfig::default();
        let totals = config.totals(self.sequences.iter().map(TrainSequence::trainable_tokens));
        let micro = pack(&self.sequences, self.budget, &config, totals).expect("the masks fit");
        let pass = PassConfig {
            recompute: self.recompute,
            ..PassConfig::default()
        };
        let mut gradients = self.decoder.zero_gradients();
        for micro in &micro {
            // What was sampled is what is computed, as in a step's first pass.
            accumulate_nll_gradient(&self.decoder, &signed(micro), pass, &mut gradients)
                .expect("the batch fits the model");
        }
        let update = self
            .optimizer
            .step(&self.decoder, &gradients, 1e-4)
            .expect("the gradient is finite");
        json!({
            "seconds": start.elapsed().as_secs_f64(),
            "grad_norm": update.grad_norm,
            "peak_bytes": peak_bytes(),
        })
    }
}

/// Returns the micro-batch with each target weighed by its advantage: on-policy, the gradient of a
/// policy's loss is that of the weighed likelihood.
fn signed(micro: &MicroBatch) -> MicroBatch {
    let mut micro = micro.clone();
    for (weight, advantage) in micro.weights.iter_mut().zip(&micro.advantages) {
        *weight *= advantage;
    }
    micro
}

/// Returns the most memory that the process has had, if the system says so.
fn peak_bytes() -> Option<u64> {
    let status = fs_err::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find(|line| line.starts_with("VmHWM:"))?;
    let kibibytes: u64 = line.split_whitespace().nth(1)?.parse().ok()?;
    Some(kibibytes * 1024)
}

/// Answers requests, one JSON object a line: `{"what": "step", "sequences": 8, "length": 256, "prompt":
/// 64, "rank": 16, "micro_batch_tokens": 512}` with `{"seconds": .., "grad_norm": .., "peak_bytes":
/// ..}`, each with a `"setting"` from [`FORMATS`] if it is not to be `f32`. A setting's first request loads
/// the model, and those after it go on with it.
fn measure() {
    let mut steps = BTreeMap::new();
    for line in std::io::stdin().lock().lines() {
        let line = line.expect("requests are text");
        let request: Value = serde_json::from_str(&line).expect("a request is JSON");
        let answer = match request["what"].as_str() {
            Some("describe") => json!({
                "version": format!("wardian {}", env!("CARGO_PKG_VERSION")),
                "settings": FORMATS.map(WeightFormat::name),
            }),
            Some("step") => steps
                .entry(request["setting"].to_string())
                .or_insert_with(|| Step::new(&request))
                .run(),
            _ => json!({ "failed": format!("unknown request {line}") }),
        };
        println!("{answer}");
    }
}

fn main() {
    if std::env::args().any(|argument| argument == "measure") {
        return measure();
    }
    let mut criterion = Criterion::default().configure_from_args();
    training(&mut criterion);
    decoding(&mut criterion);
    criterion.final_summary();
}
