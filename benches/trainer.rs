//! Training and decoding of the tiny model on the CPU.
//!
//! The model is a Qwen3 of 1.6 million weights; a step is 256 sequences of 110 tokens.
#![allow(missing_docs, reason = "criterion's macros")]

use candle_core::{DType, Device};
use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use wardian::engine::model::{
    Decoder, LoraConfig, ModelConfig, ModelType, PackedBatch, RopeScaling, Trainable,
    random_weights,
};
use wardian::trainer::{
    AdamW, AdamWConfig, LossConfig, PassConfig, TrainSequence, accumulate_policy_gradient, pack,
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

criterion_group!(benches, training, decoding);
criterion_main!(benches);
