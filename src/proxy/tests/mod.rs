//! The proxy on a toy model that speaks bytes.

mod agents;
mod sessions;

use axum::body::Body;
use axum::http::Request as HttpRequest;
use candle_core::{DType, Device};
use tower::ServiceExt as _;

use super::*;
use crate::chat::{ChatTemplate, ToolCallFormat};
use crate::engine::model::{Decoder, ModelConfig, Trainable, random_weights};
use crate::engine::{Engine, EngineConfig, EngineHandle, Tokenizer};
use crate::openai::ServedModel;

const TEMPLATE: &str = "{% if tools %}{% for t in tools %}[{{ t.function.name }}]{% endfor %}\n{% endif %}\
    {% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}\
    {% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}\
    <|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";

/// The tokens after the 256 bytes; the last one ends turns.
const SPECIAL: [&str; 2] = ["<|im_start|>", "<|im_end|>"];
const IM_END: u32 = 257;

fn tokenizer() -> Tokenizer {
    Tokenizer::byte_level(&SPECIAL).unwrap()
}

fn engine(max_requests: usize) -> EngineHandle {
    let config = ModelConfig::from_json(
        r#"{"model_type": "qwen3", "vocab_size": 258, "hidden_size": 16, "intermediate_size": 24,
            "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
            "head_dim": 8, "max_position_embeddings": 2048, "tie_word_embeddings": true,
            "eos_token_id": 257}"#,
    )
    .unwrap();
    let mut weights = random_weights(&config, 1, DType::F32, &Device::Cpu).unwrap();
    for (name, tensor) in &mut weights {
        if !name.ends_with("norm.weight") {
            *tensor = (&*tensor * 10.0).unwrap();
        }
    }
    let decoder = Decoder::new(config, weights, &Device::Cpu, &Trainable::Frozen, 0).unwrap();
    let mut engine = Engine::new(Arc::new(decoder), EngineConfig::default()).unwrap();
    engine.set_tokenizer(tokenizer());
    EngineHandle::start(engine, max_requests).unwrap().0
}

fn backend() -> Backend {
    Backend::Engine {
        engine: engine(64),
        model: ServedModel {
            name: "toy".to_owned(),
            template: ChatTemplate::new(TEMPLATE).unwrap(),
            tokenizer: tokenizer(),
            stop_token_ids: vec![IM_END],
            tool_call_format: ToolCallFormat::Hermes,
        },
    }
}

fn open_to_all() -> ProxyConfig {
    ProxyConfig {
        opens_sessions: true,
        ..ProxyConfig::default()
    }
}

fn toy() -> Router {
    router(backend(), open_to_all())
}

struct Answer {
    status: u16,
    headers: HeaderMap,
    text: String,
}

impl Answer {
    fn json(&self) -> Value {
        serde_json::from_str(&self.text).unwrap_or_else(|error| panic!("{error}: {}", self.text))
    }

    #[track_caller]
    fn ok(&self) -> Value {
        assert_eq!(self.status, 200, "{}", self.text);
        self.json()
    }

    /// The events of a stream: their names and their data.
    #[track_caller]
    fn events(&self) -> Vec<(String, String)> {
        assert_eq!(self.status, 200, "{}", self.text);
        assert_eq!(self.headers[header::CONTENT_TYPE], "text/event-stream");
        let mut parser = SseParser::new(1 << 20);
        let events = parser.push(self.text.as_bytes()).unwrap();
        parser.finish().unwrap();
        events
            .into_iter()
            .map(|event| (event.name, event.data))
            .collect()
    }

    fn datas(&self) -> Vec<Value> {
        let events = self.events().into_iter();
        events
            .filter(|(_, data)| data != "[DONE]")
            .map(|(_, data)| serde_json::from_str(&data).unwrap())
            .collect()
    }
}

async fn send(app: &Router, request: HttpRequest<Body>) -> Answer {
    let response = app.clone().oneshot(request).await.unwrap();
    let (parts, body) = response.into_parts();
    let bytes = axum::body::to_bytes(body, 1 << 24).await.unwrap();
    Answer {
        status: parts.status.as_u16(),
        headers: parts.headers,
        text: String::from_utf8(bytes.to_vec()).unwrap(),
    }
}

async fn fetch(app: &Router, path: &str) -> Answer {
    send(app, HttpRequest::get(path).body(Body::empty()).unwrap()).await
}

async fn ask(app: &Router, path: &str, body: &Value) -> Answer {
    let request = HttpRequest::post(path).header(header::AUTHORIZATION, "Bearer s");
    send(app, request.body(Body::from(body.to_string())).unwrap()).await
}

/// A chat request over `messages` with further fields.
fn chat(messages: &[Value], fields: &Value) -> Value {
    let mut body = json!({"model": "gpt-9", "messages": messages, "max_tokens": 24, "seed": 1});
    for (key, value) in fields.as_object().unwrap() {
        body[key] = value.clone();
    }
    body
}

fn user(text: &str) -> Value {
    json!({"role": "user", "content": text})
}

const CHAT: &str = "/v1/chat/completions";

async fn document(app: &Router, session: &str) -> Value {
    let path = format!("/sessions/{session}/rollout?include_messages=true&include_discarded=true");
    fetch(app, &path).await.ok()
}

fn ids(value: &Value) -> Vec<u32> {
    serde_json::from_value(value.clone()).unwrap_or_else(|error| panic!("{error}: {value}"))
}
