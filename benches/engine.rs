//! Prefill and decoding of a SmolLM2 of 135 million weights on the CPU.
//!
//!     cargo bench --bench engine                  criterion's report
//!     cargo bench --bench engine -- measure       answers requests; see scripts/compare/engine.py
//!
//! The weights are those of the GGUF file that `WARDIAN_SMOLLM2_GGUF` names; without it they are
//! random, which costs the same time. `WARDIAN_BENCH_DTYPE` is what criterion's report keeps them in:
//! `f32`, `bf16`, `bf16 products` (and multiplies them in) or `int8`.
#![allow(missing_docs, reason = "criterion's macros")]
#![allow(clippy::print_stdout, reason = "what it is for")]

use std::collections::BTreeMap;
use std::io::BufRead as _;
use std::sync::Arc;
use std::time::Duration;

use candle_core::{DType, Device};
use criterion::{Criterion, Throughput};
use serde_json::{Value, json};
use wardian::engine::measure::{self, Prefilled, Workload};
use wardian::engine::model::{
    Adapters, Decoder, ModelConfig, ModelType, PackedBatch, RopeScaling, Trainable, WeightFormat,
    random_weights,
};
use wardian::engine::{Engine, EngineConfig, LoadedModel, SamplingParams, SequenceSeed, Tokenizer};

const WEIGHTS: &str = "WARDIAN_SMOLLM2_GGUF";
const DTYPE: &str = "WARDIAN_BENCH_DTYPE";

/// Tokens of each sequence before decoding is measured.
const CONTEXT: usize = 128;

/// Sequences and tokens of each.
const PREFILL: [(usize, usize); 3] = [(1, 512), (8, 128), (8, 256)];

const DECODE: [usize; 4] = [1, 8, 16, 32];

fn smollm2() -> ModelConfig {
    ModelConfig {
        model_type: ModelType::Llama,
        vocab_size: 49_152,
        hidden_size: 576,
        intermediate_size: 1536,
        num_hidden_layers: 30,
        num_attention_heads: 9,
        num_key_value_heads: 3,
        head_dim: 64,
        max_position_embeddings: 8192,
        rms_norm_eps: 1e-5,
        rope_theta: 100_000.0,
        rope_scaling: RopeScaling::Default,
        attention_bias: false,
        mlp_bias: false,
        tie_word_embeddings: true,
        bos_token_id: None,
        eos_token_id: vec![0],
    }
}

const FORMATS: [WeightFormat; 4] = [
    WeightFormat::Wide,
    WeightFormat::Bf16,
    WeightFormat::Bf16Products,
    WeightFormat::Int8,
];

/// Returns what weights are kept in by this name.
fn format(name: &str) -> Option<WeightFormat> {
    FORMATS.into_iter().find(|format| format.name() == name)
}

/// Returns the model, where its weights are from, and its tokenizer if it is a real one.
fn decoder(format: WeightFormat) -> (Arc<Decoder>, String, Option<Tokenizer>) {
    let (config, weights, source, tokenizer) = match std::env::var(WEIGHTS) {
        Ok(path) => {
            let model = LoadedModel::open(&path, DType::F32, &Device::Cpu)
                .unwrap_or_else(|error| panic!("{path}: {error}"));
            (model.config, model.weights, path, Some(model.tokenizer))
        }
        Err(_) => {
            let config = smollm2();
            let weights = random_weights(&config, 1, DType::F32, &Device::Cpu)
                .expect("the configuration is valid");
            let source = format!("random; {WEIGHTS} is not set");
            (config, weights, source, None)
        }
    };
    let decoder =
        Decoder::with_format(config, weights, &Device::Cpu, &Trainable::Frozen, 1, format)
            .expect("the weights fit");
    let source = format!("{source}, in {}", format.name());
    (Arc::new(decoder), source, tokenizer)
}

/// Returns prompts and decoding steps to measure.
fn workload(sequences: usize, prompt_tokens: usize, steps: usize) -> Workload {
    Workload {
        sequences,
        prompt_tokens,
        steps,
    }
}

fn prefill(decoder: &Arc<Decoder>, sequences: usize, length: usize) -> Duration {
    measure::prefill(decoder, workload(sequences, length, 0)).expect("the weights are finite")
}

fn decode(decoder: &Arc<Decoder>, sequences: usize, steps: usize) -> Duration {
    Prefilled::new(decoder, workload(sequences, CONTEXT, steps))
        .and_then(Prefilled::decode)
        .expect("the weights are finite")
}

fn report(criterion: &mut Criterion) {
    let asked = std::env::var(DTYPE).unwrap_or_else(|_| "f32".to_owned());
    let format = format(&asked).unwrap_or_else(|| panic!("{DTYPE} is `{asked}`"));
    let (decoder, source, _) = decoder(format);
    println!("weights: {source}");
    let mut group = criterion.benchmark_group("prefill");
    group.sample_size(10);
    for (sequences, length) in PREFILL {
        group.throughput(Throughput::Elements((sequences * length) as u64));
        group.bench_function(format!("{sequences}x{length}"), |bencher| {
            bencher.iter_custom(|count| {
                (0..count)
                    .map(|_| prefill(&decoder, sequences, length))
                    .sum()
            });
        });
    }
    group.finish();
    let mut group = criterion.benchmark_group("decode");
    group.sample_size(10);
    for sequences in DECODE {
        group.throughput(Throughput::Elements(sequences as u64));
        group.bench_function(format!("b{sequences}"), |bencher| {
            bencher.iter_custom(|count| {
                // Engines start anew, so that every measurement sees about the same context.
                let mut left = usize::try_from(count).expect("criterion counts in thousands");
                let mut total = Duration::ZERO;
                while left > 0 {
                    let steps = left.min(32);
                    total += decode(&decoder, sequences, steps);
                    left -= steps;
                }
                total
            });
        });
    }
    group.finish();
}

/// Returns the likeliest continuation of a prompt.
fn greedy(decoder: &Arc<Decoder>, prompt: Vec<u32>, count: usize) -> Vec<u32> {
    let mut engine =
        Engine::new(Arc::clone(decoder), EngineConfig::default()).expect("the limits are valid");
    let params = SamplingParams {
        temperature: 0.0,
        max_new_tokens: count,
        ..SamplingParams::default()
    };
    engine
        .add(prompt, params, SequenceSeed::default())
        .expect("the prompt fits");
    loop {
        let finished = engine.step().expect("the weights are finite");
        if let Some(finished) = finished.into_iter().next() {
            return finished.tokens;
        }
    }
}

/// Returns the log-probability of each token of a text but the first, whose context is all before it.
fn score(decoder: &Decoder, tokens: &[u32]) -> Vec<f64> {
    let batch = PackedBatch::from_sequences([tokens]);
    let hidden = decoder
        .hidden(&batch, Adapters::On)
        .expect("the text fits the context");
    let logits = decoder
        .logits(&hidden)
        .expect("as many as there are tokens");
    let logits: Vec<Vec<f32>> = logits.to_vec2().expect("they are f32");
    let logprob = |(logits, &token): (&Vec<f32>, &u32)| {
        let sum: f64 = logits.iter().map(|&logit| f64::from(logit).exp()).sum();
        f64::from(logits[token as usize]) - sum.ln()
    };
    logits.iter().zip(&tokens[1..]).map(logprob).collect()
}

/// Answers requests, one JSON object a line, each with a `"setting"` from [`FORMATS`] if it is not to be
/// `f32`: `{"what": "prefill", "sequences": 8, "length": 128}` and
/// `{"what": "decode", "sequences": 8, "steps": 16}` with `{"seconds": ..}`,
/// `{"what": "greedy", "prompt": [..], "count": 16}` with `{"tokens": [..]}`, `{"what": "score", "file":
/// "..", "count": 1024}` with the log-probabilities of a text's first tokens and the perplexity.
fn answer() {
    let mut loaded = BTreeMap::new();
    for line in std::io::stdin().lock().lines() {
        let line = line.expect("requests are text");
        let request: Value = serde_json::from_str(&line).expect("a request is JSON");
        let number = |key: &str| {
            let value = request[key].as_u64().unwrap_or(0);
            usize::try_from(value).expect("requests are small")
        };
        let sequences = number("sequences");
        let setting = request["setting"].as_str().unwrap_or("f32");
        let Some(format) = format(setting) else {
            println!(
                "{}",
                json!({ "failed": format!("unknown setting {setting}") })
            );
            continue;
        };
        let (decoder, source, tokenizer) = loaded
            .entry(format.name())
            .or_insert_with(|| decoder(format));
        let decoder = &*decoder;
        let answer = match request["what"].as_str() {
            Some("describe") => json!({
                "version": env!("CARGO_PKG_VERSION"),
                "weights": source,
                "settings": FORMATS.map(WeightFormat::name),
                "threads": std::thread::available_parallelism().map_or(1, usize::from),
            }),
            Some("prefill") => {
                let time = prefill(decoder, sequences, number("length"));
                json!({ "seconds": time.as_secs_f64() })
            }
            Some("decode") => {
                let time = decode(decoder, sequences, number("steps"));
                json!({ "seconds": time.as_secs_f64() })
            }
            Some("greedy") => {
                let tokens = request["prompt"].as_array().into_iter().flatten();
                let prompt = tokens
                    .filter_map(Value::as_u64)
                    .filter_map(|token| u32::try_from(token).ok())
                    .collect();
                json!({ "tokens": greedy(decoder, prompt, number("count")) })
            }
            Some("score") => {
                let file = request["file"].as_str().expect("a file's name");
                let text = fs_err::read_to_string(file).expect("the file is there");
                let tokenizer = tokenizer.as_ref().expect("a real model's weights");
                let mut tokens = tokenizer.encode(&text).expect("any text has tokens");
                tokens.truncate(number("count"));
                let logprobs = score(decoder, &tokens);
                let mean = logprobs.iter().sum::<f64>() / logprobs.len() as f64;
                json!({ "perplexity": (-mean).exp(), "logprobs": logprobs })
            }
            _ => json!({ "failed": format!("unknown request {line}") }),
        };
        println!("{answer}");
    }
}

fn main() {
    if std::env::args().any(|argument| argument == "measure") {
        return answer();
    }
    let mut criterion = Criterion::default().configure_from_args();
    report(&mut criterion);
    criterion.final_summary();
}
