//! `wardian proxy` from a socket to an optimizer step: what agents sampled is what the trainer scores.

use std::path::Path;
use std::sync::Arc;

use axum::Router;
use axum::body::Body;
use axum::http::Request;
use candle_core::Tensor;
use serde_json::{Value, json};
use tower::ServiceExt as _;

use wardian::chat::ToolCallFormat;
use wardian::collective::Solo;
use wardian::config::RunConfig;
use wardian::engine::{Engine, EngineConfig, EngineHandle};
use wardian::openai::ServedModel;
use wardian::proxy::{self, Backend, ProxyConfig, Purpose};
use wardian::rollout::RolloutGroup;
use wardian::run::{Policy, STARTER_RUN, trainable};
use wardian::trainer::{
    AdamW, AdamWConfig, AdvantageConfig, GrpoConfig, GrpoTrainer, LossConfig, LrSchedule,
    PassConfig, ScheduleKind,
};
use wardian::trajectory::Trajectory;

const TASK: &str = "Write a function f(x) that takes x, adds 7, then takes the remainder modulo 9 and \
    returns the result. Your code must pass: assert f(9) == 7";

fn starter() -> Policy {
    let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/starter/model");
    let set = format!("model.path={:?}", model.display().to_string());
    let config = RunConfig::from_toml(STARTER_RUN, &[set]).expect("the starter's run is valid");
    Policy::load(&config, &trainable(&config)).expect("the starter loads")
}

fn capture(policy: &Policy) -> Router {
    let engine = Engine::new(Arc::clone(&policy.decoder), EngineConfig::default());
    let mut engine = engine.expect("the engine takes the model");
    engine.set_tokenizer(policy.tokenizer.clone());
    let (engine, _) = EngineHandle::start(engine, 16).expect("there are threads");
    let model = ServedModel {
        name: "starter".to_owned(),
        tokenizer: policy.tokenizer.clone(),
        template: policy.template.clone(),
        stop_token_ids: policy.stop_token_ids.clone(),
        tool_call_format: ToolCallFormat::detect(policy.template.source()),
    };
    let config = ProxyConfig {
        opens_sessions: true,
        purpose: Purpose::Train,
        ..ProxyConfig::default()
    };
    proxy::router(Backend::Engine { engine, model }, config)
}

async fn send(app: &Router, request: Request<Body>) -> String {
    let response = app.clone().oneshot(request).await.expect("it answers");
    let status = response.status();
    let bytes = axum::body::to_bytes(response.into_body(), 1 << 24).await;
    let text = String::from_utf8(bytes.expect("a body").to_vec()).expect("text");
    assert_eq!(status, 200, "{text}");
    text
}

/// An agent that looks at what a tool says between its two answers.
async fn agent(app: Router, session: String) {
    let tool = |name| {
        json!({"type": "function", "function": {"name": name, "parameters": {
            "type": "object", "properties": {"code": {"type": "string"}},
        }}})
    };
    let tools = json!([tool("run_python"), tool("submit_solution")]);
    let mut messages = vec![json!({"role": "user", "content": TASK})];
    for _ in 0..2 {
        let body = json!({
            "model": "gpt-9", "messages": messages, "tools": tools, "max_tokens": 40, "top_p": 0.3,
        });
        let path = format!("/{session}/v1/chat/completions");
        let request = Request::post(path).body(Body::from(body.to_string()));
        let answer = send(&app, request.expect("a request")).await;
        let answer: Value = serde_json::from_str(&answer).expect("JSON");
        messages.push(answer["choices"][0]["message"].clone());
        messages.push(json!({"role": "tool", "content": "ok"}));
    }
}

fn variables(policy: &Policy) -> Vec<Tensor> {
    let variables = policy.decoder.variables().iter();
    variables
        .map(|(_, variable)| variable.as_tensor().copy().expect("a copy"))
        .collect()
}

fn largest_change(before: &[Tensor], after: &[Tensor]) -> f32 {
    let change = |(before, after): (&Tensor, &Tensor)| {
        let change = (before - after)?.abs()?.flatten_all()?.max(0)?;
        change.to_scalar::<f32>()
    };
    let changes: candle_core::Result<Vec<f32>> = before.iter().zip(after).map(change).collect();
    changes
        .expect("tensors of one shape")
        .into_iter()
        .fold(0.0, f32::max)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_step_on_captured_rows_moves_the_policy() {
    let policy = starter();
    let app = capture(&policy);
    let agents: Vec<_> = (0..4)
        .map(|sample| tokio::spawn(agent(app.clone(), format!("s{sample}"))))
        .collect();
    for agent in agents {
        agent.await.expect("the agent ends well");
    }
    let mut rows: Vec<Trajectory> = Vec::new();
    for sample in 0..4 {
        // Half of the episodes are said to be good.
        let reward = sample % 2;
        let path =
            format!("/sessions/s{sample}/trajectories?reward={reward}&task_id=t&sample={sample}");
        let request = Request::get(path).body(Body::empty()).expect("a request");
        let text = send(&app, request).await;
        rows.extend(
            text.lines()
                .map(|line| serde_json::from_str::<Trajectory>(line).expect("a row")),
        );
    }
    assert_eq!(
        rows.len(),
        4,
        "an episode is one row: its second call goes on from the first"
    );
    assert!(rows.iter().all(|row| row.turns.len() == 2));

    let config = GrpoConfig {
        advantage: AdvantageConfig::default(),
        decoupled: None,
        token_level: None,
        overlong: None,
        reward_kl_coef: 0.0,
        loss: LossConfig::default(),
        pass: PassConfig::default(),
        micro_batch_tokens: 1000,
        iterations: 1,
        recompute_old: false,
        max_kl_sample_train: 1.0,
        max_ratio: f64::INFINITY,
        mask_truncated: false,
        parts: 1,
    };
    let optimizer = AdamW::new(&policy.decoder, AdamWConfig::default()).expect("an optimizer");
    let schedule = LrSchedule {
        // AdamW's first step moves a weight by this at most, and the bound below must be within reach.
        learning_rate: 1.1e-5,
        warmup_steps: 0,
        total_steps: 10,
        kind: ScheduleKind::Constant,
    };
    let mut trainer = GrpoTrainer::new(config, schedule, optimizer);
    let group = [RolloutGroup {
        task_id: "t".to_owned(),
        trajectories: rows,
    }];
    let before = variables(&policy);
    let first = trainer
        .step(&policy.decoder, &group, &Solo)
        .expect("a step");
    // What the trainer computes for the captured ids is what the engine sampled them with: an id
    // that is another one, or in another place, would differ by nats.
    assert!(first.logprob_difference_max < 1e-3, "{first:?}");
    assert!(first.grad_norm > 0.0, "{first:?}");
    assert!(largest_change(&before, &variables(&policy)) > 1e-5);
    // The same rows again: the good ones are likelier now, the others less.
    let second = trainer
        .step(&policy.decoder, &group, &Solo)
        .expect("a step");
    assert!(second.logprob_difference_max > 1e-3, "{second:?}");
    assert!(second.loss < first.loss - 1e-4, "{first:?} then {second:?}");
}
