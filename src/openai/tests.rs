//! The API on a toy model that speaks bytes.

use std::time::Duration;

use axum::body::Body;
use axum::http::{HeaderMap, Method, header};
use candle_core::{DType, Device};
use serde_json::Map;
use tokio::net::TcpListener;
use tower::ServiceExt as _;

use super::*;
use crate::engine::model::{Decoder, ModelConfig, Trainable, random_weights};
use crate::engine::{Engine, EngineConfig};
use crate::http::serve;

const TEMPLATE: &str = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n\
    {% endfor %}{% if tools %}<tool_call>{% endif %}\
    {% if add_generation_prompt %}<|im_start|>assistant\n\
    {% if enable_thinking %}<think>\n{% endif %}{% endif %}";

/// The tokens after the 256 bytes.
const SPECIAL: [&str; 4] = ["<think>", "</think>", "<|im_start|>", "<|im_end|>"];
const IM_END: u32 = 259;

fn model() -> ServedModel {
    let tokenizer = Tokenizer::byte_level(&SPECIAL).unwrap();
    ServedModel {
        name: "toy".to_owned(),
        template: ChatTemplate::new(TEMPLATE).unwrap(),
        tokenizer,
        stop_token_ids: vec![IM_END],
        tool_call_format: ToolCallFormat::Hermes,
    }
}

fn broken_decoder() -> Arc<Decoder> {
    let decoder = decoder(&Trainable::Full);
    let (_, variable) = &decoder.variables()[0];
    let nan = (variable.as_tensor() * f64::NAN).unwrap();
    variable.set(&nan).unwrap();
    decoder
}

fn engine(config: EngineConfig) -> Engine {
    let mut engine = Engine::new(decoder(&Trainable::Frozen), config).unwrap();
    engine.set_tokenizer(model().tokenizer);
    engine
}

fn decoder(trainable: &Trainable) -> Arc<Decoder> {
    let model_config = ModelConfig::from_json(
        r#"{"model_type": "qwen3", "vocab_size": 260, "hidden_size": 16, "intermediate_size": 24,
            "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
            "head_dim": 8, "max_position_embeddings": 512, "tie_word_embeddings": true,
            "eos_token_id": 259}"#,
    )
    .unwrap();
    let mut weights = random_weights(&model_config, 1, DType::F32, &Device::Cpu).unwrap();
    for (name, tensor) in &mut weights {
        if !name.ends_with("norm.weight") {
            *tensor = (&*tensor * 10.0).unwrap();
        }
    }
    Arc::new(Decoder::new(model_config, weights, &Device::Cpu, trainable, 0).unwrap())
}

fn service(config: ServerConfig, max_requests: usize) -> (Router, EngineHandle) {
    let engine = engine(EngineConfig::default());
    let (engine, _thread) = EngineHandle::start(engine, max_requests).unwrap();
    (router(engine.clone(), model(), config), engine)
}

fn toy() -> Router {
    service(ServerConfig::default(), 64).0
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
    fn error(&self, status: u16) -> Value {
        assert_eq!(self.status, status, "{}", self.text);
        let error = self.json()["error"].clone();
        for key in ["message", "type", "param", "code"] {
            assert!(error.get(key).is_some(), "`{key}` is missing: {error}");
        }
        error
    }

    /// The chunks of a stream, which must end in `[DONE]`.
    fn chunks(&self) -> Vec<Value> {
        let mut events: Vec<&str> = self
            .text
            .split("\n\n")
            .filter(|event| !event.is_empty())
            .map(|event| event.strip_prefix("data: ").unwrap())
            .collect();
        assert_eq!(events.pop(), Some("[DONE]"));
        events
            .into_iter()
            .map(|event| serde_json::from_str(event).unwrap())
            .collect()
    }
}

async fn send(app: &Router, request: axum::http::Request<Body>) -> Answer {
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
    send(
        app,
        axum::http::Request::get(path).body(Body::empty()).unwrap(),
    )
    .await
}

async fn ask(app: &Router, path: &str, body: &Value) -> Answer {
    let request = axum::http::Request::post(path)
        .header(header::CONTENT_TYPE, "application/json")
        .body(Body::from(body.to_string()));
    send(app, request.unwrap()).await
}

/// A chat request with further fields.
fn chat(fields: &Value) -> Value {
    let mut body = json!({
        "model": "toy", "messages": [{"role": "user", "content": "hi"}], "seed": 7,
        "max_completion_tokens": 24,
    });
    for (key, value) in fields.as_object().unwrap() {
        body[key] = value.clone();
    }
    body
}

const CHAT: &str = "/v1/chat/completions";
const COMPLETIONS: &str = "/v1/completions";

#[tokio::test]
async fn a_chat_is_answered_in_openais_shape() {
    let app = toy();
    let answer = ask(
        &app,
        CHAT,
        &chat(&json!({"n": 2, "return_token_ids": true})),
    )
    .await
    .json();
    assert_eq!(answer["object"], "chat.completion");
    assert_eq!(answer["model"], "toy");
    assert!(answer["id"].as_str().unwrap().starts_with("chatcmpl-"));
    let choices = answer["choices"].as_array().unwrap();
    assert_eq!(choices.len(), 2);
    assert_ne!(
        choices[0]["message"]["content"],
        choices[1]["message"]["content"]
    );
    let mut completion = 0;
    for (index, choice) in choices.iter().enumerate() {
        assert_eq!(choice["index"], index);
        assert_eq!(choice["message"]["role"], "assistant");
        assert!(["stop", "length"].contains(&choice["finish_reason"].as_str().unwrap()));
        let ids: Vec<u32> = serde_json::from_value(choice["token_ids"].clone()).unwrap();
        completion += ids.len();
        let ids = ids.strip_suffix(&[IM_END]).unwrap_or(&ids);
        let text = model().tokenizer.decode(ids).unwrap();
        assert_eq!(choice["message"]["content"], text);
    }
    let prompt: Vec<u32> = serde_json::from_value(answer["prompt_token_ids"].clone()).unwrap();
    let text = model().tokenizer.decode(&prompt).unwrap();
    assert_eq!(
        text,
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    );
    assert_eq!(answer["usage"]["prompt_tokens"], prompt.len());
    assert_eq!(answer["usage"]["completion_tokens"], completion);
    assert_eq!(answer["usage"]["total_tokens"], prompt.len() + completion);
    assert_eq!(answer["usage"]["prompt_tokens_details"]["cached_tokens"], 0);
}

#[tokio::test]
async fn a_stream_tells_what_the_whole_answer_tells() {
    let app = toy();
    for fields in [
        json!({}),
        json!({"n": 3, "logprobs": true, "top_logprobs": 2, "return_token_ids": true}),
        json!({"chat_template_kwargs": {"enable_thinking": true}}),
        json!({"tools": [{"type": "function", "function": {"name": "f"}}], "stop": ["e", "a"]}),
    ] {
        let whole = ask(&app, CHAT, &chat(&fields)).await.json();
        let mut body = chat(&fields);
        body["stream"] = Value::from(true);
        body["stream_options"] = json!({"include_usage": true});
        let answer = ask(&app, CHAT, &body).await;
        assert_eq!(answer.headers[header::CONTENT_TYPE], "text/event-stream");
        let mut chunks = answer.chunks();
        let usage = chunks.pop().unwrap();
        assert_eq!(usage["choices"], json!([]));
        for key in ["prompt_tokens", "completion_tokens"] {
            assert_eq!(usage["usage"][key], whole["usage"][key]);
        }
        if let Some(ids) = whole.get("prompt_token_ids") {
            assert_eq!(&chunks[0]["prompt_token_ids"], ids);
        }
        for (index, expected) in whole["choices"].as_array().unwrap().iter().enumerate() {
            let (mut content, mut reasoning) = (String::new(), String::new());
            let (mut logprobs, mut ids) = (Vec::new(), Vec::new());
            let mut finish = Value::Null;
            for chunk in &chunks {
                assert_eq!(chunk["object"], "chat.completion.chunk");
                let choice = &chunk["choices"][0];
                if choice["index"] != index {
                    continue;
                }
                let text = |key: &str| choice["delta"][key].as_str().unwrap_or_default().to_owned();
                content += &text("content");
                reasoning += &text("reasoning_content");
                logprobs.extend(
                    choice["logprobs"]["content"]
                        .as_array()
                        .cloned()
                        .unwrap_or_default(),
                );
                ids.extend(choice["token_ids"].as_array().cloned().unwrap_or_default());
                assert_eq!(finish, Value::Null, "nothing follows the end");
                finish = choice["finish_reason"].clone();
            }
            let message = &expected["message"];
            assert_eq!(content, message["content"].as_str().unwrap());
            assert_eq!(
                reasoning,
                message["reasoning_content"].as_str().unwrap_or_default()
            );
            assert_eq!(finish, expected["finish_reason"]);
            if let Some(expected) = expected["logprobs"]["content"].as_array() {
                assert_eq!(&logprobs, expected);
                assert!(
                    logprobs
                        .iter()
                        .all(|entry| entry["top_logprobs"].as_array().unwrap().len() == 2)
                );
            }
            if let Some(expected) = expected["token_ids"].as_array() {
                assert_eq!(&ids, expected);
            }
        }
    }
}

#[tokio::test]
async fn reasoning_that_the_template_opens_is_told_apart_and_has_a_budget() {
    let app = toy();
    let body = chat(&json!({
        "chat_template_kwargs": {"enable_thinking": true}, "thinking_token_budget": 5,
        "logit_bias": {"256": -100, "257": -100, "259": -100}, "return_token_ids": true,
        "temperature": 0.5,
    }));
    let choice = ask(&app, CHAT, &body).await.json()["choices"][0].clone();
    let ids: Vec<u32> = serde_json::from_value(choice["token_ids"].clone()).unwrap();
    assert_eq!(
        ids[5..9],
        [10, 257, 10, 10],
        "a newline, `</think>`, two newlines"
    );
    let decode = |ids: &[u32]| model().tokenizer.decode(ids).unwrap();
    let reasoning = decode(&ids[..5]);
    assert_eq!(
        choice["message"]["reasoning_content"],
        reasoning.trim_matches('\n')
    );
    assert_eq!(
        choice["message"]["content"],
        decode(&ids[9..]).trim_start_matches('\n')
    );
}

#[tokio::test]
async fn the_same_seed_gets_the_same_tokens_at_any_load() {
    let (app, engine) = service(ServerConfig::default(), 64);
    let body = |seed: u64| {
        let text = "x".repeat(usize::try_from(seed).unwrap() * 9);
        chat(&json!({
            "seed": seed, "messages": [{"role": "user", "content": text}], "logprobs": true,
            "top_logprobs": 3, "frequency_penalty": 0.3, "repetition_penalty": 1.1,
        }))
    };
    let mut alone = Vec::new();
    for seed in 0..8 {
        alone.push(ask(&app, CHAT, &body(seed)).await.json()["choices"].clone());
    }
    let other: Vec<_> = (0..16)
        .map(|seed| {
            let app = app.clone();
            let body = body(seed % 8);
            tokio::spawn(async move { ask(&app, CHAT, &body).await.json()["choices"].clone() })
        })
        .collect();
    for (seed, task) in other.into_iter().enumerate() {
        assert_eq!(task.await.unwrap(), alone[seed % 8]);
    }
    assert!(
        engine.status().stats.prefix_hit_tokens > 0,
        "caches were in play"
    );
    let unseeded = async || {
        let mut body = body(3);
        body.as_object_mut().unwrap().remove("seed");
        ask(&app, CHAT, &body).await.json()["choices"].clone()
    };
    assert_ne!(unseeded().await, unseeded().await);
}

/// With a bias for each byte in turn, the toy model says what it is told to.
#[tokio::test]
async fn tool_calls_are_told_whole_and_in_pieces() {
    let app = toy();
    let tools = json!([{"type": "function", "function": {
        "name": "f", "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}},
    }}]);
    // The text comes from the parser's side: a reader that knows the tools.
    let reader = TurnReader {
        format: ToolCallFormat::Hermes,
        tools: serde_json::from_value(tools.clone()).unwrap(),
        is_thinking: false,
    };
    let text = "I call.\n<tool_call>\n{\"name\": \"f\", \"arguments\": {\"x\": 1}}\n</tool_call>";
    let read = reader.read(text);
    let told = call_json(&read.tool_calls[0], "call-1");
    assert_eq!(
        told,
        json!({"id": "call-1", "type": "function",
               "function": {"name": "f", "arguments": "{\"x\":1}"}})
    );
    assert_eq!(reader.settled(text).1, "I call.");
    // A conversation with calls is rendered, whatever form the arguments have.
    let messages = json!([
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": null, "tool_calls": [told]},
        {"role": "tool", "tool_call_id": "call-1", "content": "<|im_end|>"},
    ]);
    let body = chat(&json!({"messages": messages, "tools": tools, "return_token_ids": true}));
    let answer = ask(&app, CHAT, &body).await.json();
    let ids: Vec<u32> = serde_json::from_value(answer["prompt_token_ids"].clone()).unwrap();
    let text = model().tokenizer.decode(&ids).unwrap();
    assert!(text.contains("<|im_start|>system\nBe brief."), "{text}");
    assert!(text.contains("<|im_start|>user\nab<"), "{text}");
    assert!(text.contains("<tool_call>"), "{text}");
}

#[tokio::test]
async fn completions_take_text_and_tokens() {
    let app = toy();
    let complete = async |fields: Value| {
        let mut body = json!({"model": "toy", "max_tokens": 8, "seed": 1, "prompt": "ab"});
        for (key, value) in fields.as_object().unwrap() {
            body[key] = value.clone();
        }
        ask(&app, COMPLETIONS, &body).await
    };
    let text = complete(json!({})).await.json();
    assert_eq!(text["object"], "text_completion");
    let tokens = complete(json!({"prompt": [97, 98]})).await.json();
    assert_eq!(text["choices"], tokens["choices"]);
    let several = complete(json!({"prompt": ["ab", "cd"], "n": 2}))
        .await
        .json();
    let choices = several["choices"].as_array().unwrap();
    let indices: Vec<u64> = choices
        .iter()
        .map(|choice| choice["index"].as_u64().unwrap())
        .collect();
    assert_eq!(indices, [0, 1, 2, 3]);
    assert_eq!(choices[0]["text"], text["choices"][0]["text"]);
    assert_eq!(several["usage"]["prompt_tokens"], 4);

    let logprobs = complete(json!({"logprobs": 2})).await.json()["choices"][0]["logprobs"].clone();
    let count = logprobs["tokens"].as_array().unwrap().len();
    for key in ["token_logprobs", "top_logprobs", "text_offset"] {
        assert_eq!(logprobs[key].as_array().unwrap().len(), count, "{key}");
    }
    let stream = complete(json!({"stream": true})).await;
    let streamed: String = stream
        .chunks()
        .iter()
        .map(|chunk| chunk["choices"][0]["text"].as_str().unwrap().to_owned())
        .collect();
    assert_eq!(streamed, text["choices"][0]["text"].as_str().unwrap());

    for (fields, param) in [
        (json!({"echo": true}), "echo"),
        (json!({"prompt": ""}), "prompt"),
        (json!({"prompt": [300]}), "prompt"),
        (json!({"prompt": ["a", "b"], "stream": true}), "prompt"),
        (json!({"logprobs": 21}), "logprobs"),
        (json!({"prompt": []}), "prompt"),
        (json!({"prompt": "x".repeat(600)}), "prompt"),
        (json!({"prompt": {"text": "a"}}), "prompt"),
        (json!({"prompt": ["a", 5]}), "prompt"),
        (json!({"max_tokens": 0}), "max_tokens"),
        (json!({"logprobs": true}), "logprobs"),
    ] {
        let error = complete(fields.clone()).await.error(400);
        assert_eq!(error["param"], param, "{fields}: {error}");
    }
}

#[tokio::test]
async fn what_cannot_be_is_refused_with_the_field() {
    let app = toy();
    for (fields, param) in [
        (json!({"temperature": -1}), "temperature"),
        (json!({"top_p": 0}), "top_p"),
        (json!({"n": 0}), "n"),
        (json!({"n": 1000}), "n"),
        (json!({"presence_penalty": 3}), "presence_penalty"),
        (json!({"logit_bias": {"x": 1}}), "logit_bias"),
        (json!({"logit_bias": {"1": 101}}), "logit_bias"),
        (
            json!({"logit_bias": {"260": 1}, "stream": true}),
            "logit_bias",
        ),
        (json!({"stop": [""]}), "stop"),
        (
            json!({"top_logprobs": 21, "logprobs": true}),
            "top_logprobs",
        ),
        (json!({"max_completion_tokens": 0}), "max_completion_tokens"),
        (
            json!({"max_completion_tokens": null, "max_tokens": 0}),
            "max_tokens",
        ),
        (json!({"min_tokens": 25}), "min_tokens"),
        (
            json!({"thinking_token_budget": -1}),
            "thinking_token_budget",
        ),
        (json!({"stop_token_ids": [260]}), "stop_token_ids"),
        (json!({"stop_token_ids": vec![0; 65]}), "stop_token_ids"),
        (json!({"temperature": 1e-30}), "temperature"),
        (json!({"temperature": 1e-300}), "temperature"),
        (json!({"temperature": 1e30}), "temperature"),
        (json!({"temperature": 1e300}), "temperature"),
        (json!({"top_k": -2}), "top_k"),
        (json!({"top_logprobs": 2}), "top_logprobs"),
        (json!({"messages": []}), "messages"),
        (
            json!({"messages": [{"role": "robot", "content": ""}]}),
            "messages",
        ),
        (
            json!({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}),
            "messages",
        ),
        (json!({"tool_choice": "required"}), "tool_choice"),
        (json!({"tool_choice": "some"}), "tool_choice"),
        (json!({"tool_choice": {"type": "function"}}), "tool_choice"),
        (
            json!({"response_format": {"type": "xml"}}),
            "response_format",
        ),
        (
            json!({"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}}),
            "response_format",
        ),
        (
            json!({"response_format": {"type": "json_schema", "json_schema": {
                "strict": true, "schema": {"type": "object", "if": {}}}}}),
            "response_format",
        ),
        (
            json!({"response_format": {"type": "json_schema", "json_schema": {
                "schema": {"type": "string", "pattern": "("}}}}),
            "response_format",
        ),
        (
            json!({"response_format": {"type": "json_object"}, "min_tokens": 2}),
            "min_tokens",
        ),
        (
            json!({"response_format": {"type": "json_object"}, "ignore_eos": true}),
            "ignore_eos",
        ),
        (json!({"tools": [{"type": "function"}]}), "tools"),
        (
            json!({"chat_template_kwargs": {"enable_thinking": 1}}),
            "chat_template_kwargs",
        ),
    ] {
        let error = ask(&app, CHAT, &chat(&fields)).await.error(400);
        assert_eq!(error["type"], "invalid_request_error");
        assert_eq!(error["param"], param, "{fields}: {error}");
        let message = error["message"].as_str().unwrap();
        for internal in ["new_tokens", "max_context", "max_cache", "`thinking`"] {
            assert!(!message.contains(internal), "{fields}: {message}");
        }
    }
    // Both numbers of a limit.
    let long = json!([{"role": "user", "content": "x".repeat(600)}]);
    let error = ask(&app, CHAT, &chat(&json!({"messages": long})))
        .await
        .error(400);
    assert_eq!(error["code"], "context_length_exceeded");
    let message = error["message"].as_str().unwrap();
    assert!(
        message.contains("512") && message.contains("619"),
        "{message}"
    );
    let error = ask(&app, CHAT, &chat(&json!({"max_completion_tokens": 512})))
        .await
        .error(400);
    assert_eq!(error["code"], "context_length_exceeded");

    let error = ask(&app, CHAT, &chat(&json!({"model": "gpt-4"})))
        .await
        .error(404);
    assert_eq!(error["code"], "model_not_found");
    assert_eq!(error["param"], "model");
    fetch(&app, "/v1/nothing").await.error(404);
    fetch(&app, CHAT).await.error(405);
}

#[tokio::test]
async fn a_field_of_another_type_is_refused_in_words_of_json() {
    let app = toy();
    let with = |field: &str, value: Value| chat(&json!({field: value}));
    for (field, value, message) in [
        (
            "temperature",
            json!("hot"),
            "must be a number, not a string",
        ),
        (
            "max_completion_tokens",
            json!(-1),
            "must be an integer that is not negative, not a negative number",
        ),
        ("n", json!(1.5), "not a number with a fraction"),
        (
            "seed",
            json!([1]),
            "must be an integer of 64 bits, not a list",
        ),
        (
            "stream",
            json!("yes"),
            "must be true or false, not a string",
        ),
        ("stop", json!([1]), "not a list of something else"),
        ("stop_token_ids", json!([-1]), "must be a list of token ids"),
        ("logit_bias", json!({"1": "a"}), "the bias of token 1"),
        (
            "stream_options",
            json!({"include_usage": 1}),
            "`include_usage`",
        ),
        ("messages", json!("hi"), "must be a list, not a string"),
        (
            "messages",
            json!([5]),
            "message 0 is malformed: it must be an object",
        ),
        (
            "messages",
            json!([{"role": "user", "content": 5}]),
            "`content` must be a string, not a number",
        ),
        (
            "messages",
            json!([{"role": "assistant", "tool_calls": [{"function": {"arguments": "{}"}}]}]),
            "a call has no `name`",
        ),
        (
            "tools",
            json!([{"function": {"name": 1}}]),
            "tool 0 is malformed",
        ),
        (
            "tools",
            json!([{"type": "web_search"}]),
            "the type `function`",
        ),
        (
            "chat_template_kwargs",
            json!([]),
            "must be an object, not a list",
        ),
        ("model", json!(3), "must be a string, not a number"),
    ] {
        let error = ask(&app, CHAT, &with(field, value)).await.error(400);
        assert_eq!(error["param"], field, "{error}");
        let found = error["message"].as_str().unwrap();
        assert!(found.contains(message), "`{message}` is not in: {found}");
        for leak in ["f32", "usize", "i64", "struct", "enum", "variant", "JSON"] {
            assert!(!found.contains(leak), "{found}");
        }
    }
    // What JSON has one kind of number for.
    let body = chat(&json!({"max_completion_tokens": 4.0, "n": 1.0, "top_k": -1, "stop": null}));
    assert_eq!(ask(&app, CHAT, &body).await.status, 200);

    for (body, message) in [
        ("{\"model\": ", "not JSON"),
        ("{\"temperature\": NaN}", "not JSON"),
        ("[]", "must be a JSON object, not a list"),
        ("{}", "`model` is missing"),
        ("{\"model\": \"toy\"}", "`messages` is missing"),
    ] {
        let request = axum::http::Request::post(CHAT).body(Body::from(body));
        let error = send(&app, request.unwrap()).await.error(400);
        let found = error["message"].as_str().unwrap();
        assert!(found.contains(message), "`{message}` is not in: {found}");
    }
}

/// More than are ever let in at a time is no matter of coming back later.
#[tokio::test]
async fn more_than_can_ever_be_let_in_is_refused_with_both_numbers() {
    let (app, _) = service(ServerConfig::default(), 16);
    for (path, body, param, numbers) in [
        (
            COMPLETIONS,
            json!({"model": "toy", "prompt": vec!["a"; 50]}),
            "prompt",
            ["50", "16"],
        ),
        (
            COMPLETIONS,
            json!({"model": "toy", "prompt": vec!["a"; 9], "n": 2}),
            "prompt",
            ["18", "16"],
        ),
        (CHAT, chat(&json!({"n": 17})), "n", ["17", "16"]),
    ] {
        let error = ask(&app, path, &body).await.error(400);
        assert_eq!(error["param"], param, "{error}");
        let message = error["message"].as_str().unwrap();
        for number in numbers {
            assert!(message.contains(number), "`{number}` is not in: {message}");
        }
    }
    let most = json!({"model": "toy", "prompt": vec!["a"; 16], "max_tokens": 1});
    assert_eq!(ask(&app, COMPLETIONS, &most).await.status, 200);
}

#[tokio::test]
async fn requests_are_bounded_before_they_are_read() {
    let config = ServerConfig {
        max_body_bytes: 1000,
        ..ServerConfig::default()
    };
    let (app, _) = service(config, 64);
    let messages = json!([{"role": "user", "content": "x".repeat(2000)}]);
    let error = ask(&app, CHAT, &chat(&json!({"messages": messages})))
        .await
        .error(413);
    assert!(
        error["message"].as_str().unwrap().contains("1000"),
        "{error}"
    );
}

#[tokio::test]
async fn a_key_is_asked_for_where_one_is_set() {
    let config = ServerConfig {
        api_key: Some(ApiKey::new("secret")),
        ..ServerConfig::default()
    };
    assert!(!format!("{config:?}").contains("secret"));
    let (app, _) = service(config, 64);
    let with = async |key: Option<&str>| {
        let mut request = axum::http::Request::builder()
            .method(Method::GET)
            .uri("/v1/models");
        if let Some(key) = key {
            request = request.header(header::AUTHORIZATION, key);
        }
        send(&app, request.body(Body::empty()).unwrap()).await
    };
    for wrong in [
        None,
        Some("secret"),
        Some("Bearer "),
        Some("Bearer secret2"),
    ] {
        assert_eq!(with(wrong).await.error(401)["code"], "invalid_api_key");
    }
    let models = with(Some("Bearer secret")).await.json();
    assert_eq!(models["data"][0]["id"], "toy");
    assert_eq!(models["data"][0]["max_model_len"], 512);
    assert_eq!(ask(&app, CHAT, &chat(&json!({}))).await.status, 401);
    assert_eq!(fetch(&app, "/health").await.status, 200);
}

#[tokio::test]
async fn a_client_that_asks_too_often_is_told_to_come_back() {
    let config = ServerConfig {
        rate_limit: Some("60/m:2".parse().unwrap()),
        ..ServerConfig::default()
    };
    let app = service(config, 8).0;
    for _ in 0..2 {
        assert_eq!(fetch(&app, "/v1/models").await.status, 200);
    }
    let refused = fetch(&app, "/v1/models").await;
    assert_eq!(refused.headers[header::RETRY_AFTER], "1");
    assert_eq!(refused.error(429)["code"], "rate_limit_exceeded");
    let metrics = fetch(&app, "/metrics").await.text;
    assert!(metrics.contains("http_rate_limited_total 1\n"), "{metrics}");
}

#[tokio::test]
async fn too_much_at_a_time_is_told_to_come_back() {
    let (app, engine) = service(ServerConfig::default(), 2);
    let endless = json!({"ignore_eos": true, "max_completion_tokens": 400, "stream": true, "n": 2});
    let request = axum::http::Request::post(CHAT).body(Body::from(chat(&endless).to_string()));
    let under_way = app.clone().oneshot(request.unwrap()).await.unwrap();
    let until_running = async |count: usize| {
        for _ in 0..2000 {
            if engine.status().running == count {
                return;
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        panic!("{:?} and not {count} running", engine.status());
    };
    until_running(2).await;
    let refused = ask(&app, CHAT, &chat(&json!({}))).await;
    let error = refused.error(429);
    assert_eq!(error["code"], "rate_limit_exceeded");
    assert_eq!(refused.headers[header::RETRY_AFTER], "1");

    // The client goes away: its place is free long before 400 tokens are made.
    drop(under_way);
    until_running(0).await;
    assert!(engine.status().stats.generated_tokens < 800);
    assert_eq!(engine.status().cached_tokens, 0);
    assert_eq!(ask(&app, CHAT, &chat(&json!({}))).await.status, 200);
}

#[tokio::test]
async fn metrics_count_what_was_done() {
    let app = toy();
    ask(&app, CHAT, &chat(&json!({}))).await.json();
    ask(&app, CHAT, &chat(&json!({"stream": true})))
        .await
        .chunks();
    ask(&app, CHAT, &chat(&json!({"n": 0}))).await.error(400);
    let text = fetch(&app, "/metrics").await.text;
    for line in [
        "http_requests_total{endpoint=\"/v1/chat/completions\",status=\"200\"} 2",
        "http_requests_total{endpoint=\"/v1/chat/completions\",status=\"400\"} 1",
        "completion_seconds_count 2",
        "completion_first_token_seconds_count 1",
        "engine_running_sequences 0",
        "# TYPE engine_generated_tokens_total counter",
    ] {
        assert!(
            text.lines().any(|found| found == line),
            "`{line}` is not in\n{text}"
        );
    }
}

#[tokio::test]
async fn a_fault_of_the_model_is_an_error_and_frees_what_it_held() {
    let engine = Engine::new(broken_decoder(), EngineConfig::default()).unwrap();
    let (broken, thread) = EngineHandle::start(engine, 4).unwrap();
    let app = router(broken.clone(), model(), ServerConfig::default());
    for _ in 0..2 {
        let error = ask(&app, CHAT, &chat(&json!({"n": 4}))).await.error(500);
        assert_eq!(error["type"], "server_error");
        assert!(
            error["message"].as_str().unwrap().contains("not finite"),
            "{error}"
        );
    }
    let answer = ask(&app, CHAT, &chat(&json!({"stream": true}))).await;
    assert_eq!(answer.status, 200, "it had begun");
    assert!(answer.text.contains("server_error"), "{}", answer.text);
    assert!(!answer.text.contains("[DONE]"), "{}", answer.text);
    assert_eq!(broken.status().running, 0);
    assert_eq!(fetch(&app, "/health").await.json()["status"], "ok");
    drop((app, broken));
    // Nobody can ask any more, so the thread ends.
    tokio::task::spawn_blocking(move || thread.join().unwrap())
        .await
        .unwrap();
}

/// Sends a chat request over a socket of its own.
async fn post(address: std::net::SocketAddr, body: &Value) -> tokio::net::TcpStream {
    use tokio::io::AsyncWriteExt as _;

    let body = body.to_string();
    let mut client = tokio::net::TcpStream::connect(address).await.unwrap();
    let request = format!(
        "POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n\
         Content-Length: {}\r\n\r\n{body}",
        body.len()
    );
    client.write_all(request.as_bytes()).await.unwrap();
    client
}

#[tokio::test]
async fn a_client_that_hangs_up_frees_what_it_held() {
    let (app, engine) = service(ServerConfig::default(), 64);
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let server = tokio::spawn(serve(listener, app, std::future::pending(), Duration::ZERO));
    for is_streamed in [false, true] {
        let body = chat(&json!({
            "ignore_eos": true, "max_completion_tokens": 400, "n": 16, "stream": is_streamed,
        }));
        let client = post(address, &body).await;
        let until = async |count: usize| {
            for _ in 0..4000 {
                if engine.status().running == count {
                    return;
                }
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
            panic!("{:?} and not {count} running", engine.status());
        };
        until(16).await;
        drop(client);
        until(0).await;
    }
    let made = engine.status().stats.generated_tokens;
    assert!(made < 16 * 400, "one of the two was made to its end");
    server.abort();
}

#[tokio::test]
async fn a_server_that_is_asked_to_stop_finishes_what_is_under_way() {
    use tokio::io::AsyncReadExt as _;

    let (app, _) = service(ServerConfig::default(), 64);
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
    let shutdown = async {
        let _ = stopped.await;
    };
    let server = tokio::spawn(serve(listener, app, shutdown, Duration::from_secs(60)));
    let body = chat(&json!({"ignore_eos": true, "stream": true, "max_completion_tokens": 200}));
    let mut client = post(address, &body).await;
    let mut answer = vec![0; 64];
    client.read_exact(&mut answer).await.unwrap();
    stop.send(()).unwrap();
    client.read_to_end(&mut answer).await.unwrap();
    let answer = String::from_utf8(answer).unwrap();
    assert!(answer.starts_with("HTTP/1.1 200 OK"), "{answer}");
    assert!(answer.contains("data: [DONE]"), "{answer}");
    server.await.unwrap();
    let again = tokio::net::TcpStream::connect(address).await;
    assert_eq!(
        again.unwrap_err().kind(),
        std::io::ErrorKind::ConnectionRefused
    );
}

/// A request whose answer has a shape; long enough for the toy model, which knows no words, to end.
fn shaped(fields: &Value) -> Value {
    let mut request = chat(&json!({
        "max_completion_tokens": 400, "temperature": 1.0,
        "chat_template_kwargs": {"enable_thinking": false},
        "tools": [
            {"type": "function", "function": {"name": "add", "parameters": {
                "type": "object",
                "properties": {"a": {"enum": [1, 22]}, "b": {"type": "boolean"}},
                "required": ["a", "b"], "additionalProperties": false}}},
            {"type": "function", "function": {"name": "stop", "parameters": {
                "type": "object", "properties": {}, "additionalProperties": false}}},
        ],
    }));
    for (key, value) in fields.as_object().unwrap() {
        request[key] = value.clone();
    }
    request
}

#[tokio::test]
async fn answers_keep_to_a_schema_whatever_the_model_wants() {
    let app = toy();
    let schema = json!({
        "type": "object",
        "properties": {"colour": {"enum": ["red", "green"]}, "count": {"type": "integer", "minimum": 0, "maximum": 99}},
        "required": ["colour", "count"],
        "additionalProperties": false,
    });
    let format = json!({"type": "json_schema", "json_schema": {"name": "a", "strict": true, "schema": schema}});
    for seed in 0..8 {
        let request = shaped(&json!({"response_format": format, "tools": [], "seed": seed}));
        let answer = ask(&app, CHAT, &request).await.json();
        let choice = &answer["choices"][0];
        assert_eq!(choice["finish_reason"], "stop", "{answer}");
        let text = choice["message"]["content"].as_str().unwrap();
        let value: Value = serde_json::from_str(text).unwrap();
        assert!(
            ["red", "green"].contains(&value["colour"].as_str().unwrap()),
            "{text}"
        );
        assert!(value["count"].as_u64().unwrap() < 100, "{text}");
        assert_eq!(value.as_object().unwrap().len(), 2, "{text}");
        // The same tokens when they are sent one by one.
        let mut streamed = request.clone();
        streamed["stream"] = json!(true);
        let chunks = ask(&app, CHAT, &streamed).await.chunks();
        let content = chunks
            .iter()
            .filter_map(|chunk| chunk["choices"][0]["delta"]["content"].as_str());
        assert_eq!(content.collect::<String>(), text);
    }
}

#[tokio::test]
async fn a_call_that_is_required_comes_and_can_be_read() {
    let app = toy();
    for (choice, most) in [
        (json!("required"), 64),
        (json!({"type": "function", "function": {"name": "add"}}), 1),
    ] {
        for seed in 0..6 {
            let request =
                shaped(&json!({"tool_choice": choice, "seed": seed, "max_completion_tokens": 480}));
            let answer = ask(&app, CHAT, &request).await.json();
            let message = &answer["choices"][0]["message"];
            if answer["choices"][0]["finish_reason"] == "length" {
                continue; // More calls than there was room for.
            }
            assert_eq!(
                answer["choices"][0]["finish_reason"], "tool_calls",
                "{answer}"
            );
            assert!(message["content"].is_null(), "{answer}");
            let calls = message["tool_calls"].as_array().unwrap();
            assert!((1..=most).contains(&calls.len()), "{answer}");
            for call in calls {
                let arguments = call["function"]["arguments"].as_str().unwrap();
                let arguments: Value = serde_json::from_str(arguments).unwrap();
                match call["function"]["name"].as_str().unwrap() {
                    "add" => assert!(
                        arguments["a"].is_u64() && arguments["b"].is_boolean(),
                        "{answer}"
                    ),
                    "stop" => assert_eq!((arguments, most), (json!({}), 64)),
                    other => panic!("{other}"),
                }
            }
        }
    }
    let request =
        shaped(&json!({"tool_choice": {"type": "function", "function": {"name": "nope"}}}));
    assert_eq!(
        ask(&app, CHAT, &request).await.error(400)["param"],
        "tool_choice"
    );
}

fn in_schema(schema: &Value) -> Value {
    json!({"type": "json_schema", "json_schema": {"schema": schema}})
}

#[tokio::test]
async fn a_schema_that_would_take_the_server_down_is_refused() {
    let app = toy();
    let links = |count: usize| -> Map<String, Value> {
        let next = |at: usize| json!({"type": "object", "properties": {"x": {"$ref": format!("#/$defs/{}", at + 1)}}});
        (0..count).map(|at| (at.to_string(), next(at))).collect()
    };
    let properties: Map<String, Value> = (0..8000).map(|at| (at.to_string(), json!({}))).collect();
    let patterns: Map<String, Value> = (0..400).map(|at| (format!("^a{at}$"), json!({}))).collect();
    for schema in [
        json!({"$ref": "#/$defs/0", "$defs": links(800)}),
        json!({"type": "object", "properties": properties}),
        json!({"type": "object", "patternProperties": patterns}),
        json!({
            "anyOf": vec![json!({"type": "array"}); 3000], "type": "array",
            "items": {"const": vec![1; 10_000]},
        }),
    ] {
        let began = std::time::Instant::now();
        let request = shaped(&json!({"response_format": in_schema(&schema), "tools": []}));
        let error = ask(&app, CHAT, &request).await.error(400);
        assert_eq!(error["param"], "response_format");
        let tool = json!({"type": "function", "function": {"name": "f", "parameters": schema}});
        let request = shaped(&json!({"tools": [tool], "tool_choice": "required"}));
        let error = ask(&app, CHAT, &request).await.error(400);
        assert_eq!(error["param"], "tool_choice");
        assert!(error["message"].as_str().unwrap().len() < 500, "{error}");
        assert!(
            began.elapsed() < Duration::from_secs(10),
            "{:?}",
            began.elapsed()
        );
    }
    assert_eq!(fetch(&app, "/health").await.json()["status"], "ok");
}

#[tokio::test]
async fn nothing_is_compiled_for_who_finds_no_place() {
    let (app, engine) = service(ServerConfig::default(), 1);
    let schema = json!({"type": "string", "pattern": "("});
    let request = shaped(&json!({"response_format": in_schema(&schema), "tools": []}));
    let place = engine.reserve(1).unwrap();
    ask(&app, CHAT, &request).await.error(429);
    drop(place);
    ask(&app, CHAT, &request).await.error(400);
    assert!(
        engine.reserve(1).is_ok(),
        "who is refused gives its place back"
    );
}

/// Returns whether a thread of this process compiles a grammar.
#[cfg(target_os = "linux")]
fn is_compiling() -> bool {
    let threads = fs_err::read_dir("/proc/self/task").unwrap();
    threads.filter_map(Result::ok).any(|thread| {
        let name = fs_err::read_to_string(thread.path().join("comm"));
        name.is_ok_and(|name| name.trim() == "compile grammar")
    })
}

#[cfg(target_os = "linux")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_end_does_not_wait_for_what_is_compiled() {
    let engine = engine(EngineConfig::default());
    let (engine, thread) = EngineHandle::start(engine, 8).unwrap();
    let app = router(engine.clone(), model(), ServerConfig::default());
    let object = |at: usize| {
        let name = format!("a{at}");
        json!({"type": "object", "properties": {name.as_str(): {"type": "string"}}, "required": [name]})
    };
    let schema = json!({"anyOf": (0..1000).map(object).collect::<Vec<_>>()});
    let request = shaped(&json!({"response_format": in_schema(&schema), "tools": []}));
    let asking = tokio::spawn(async move { ask(&app, CHAT, &request).await.status });
    // It has its place first; other tests may be compiling, too.
    while engine.reserve(8).is_ok() || !is_compiling() {
        assert!(!asking.is_finished());
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    tokio::time::sleep(Duration::from_millis(100)).await;
    asking.abort();
    assert!(asking.await.unwrap_err().is_cancelled());
    drop(engine);
    tokio::task::spawn_blocking(move || thread.join().unwrap())
        .await
        .unwrap();
    assert!(is_compiling(), "it was over before the engine was");
}

#[tokio::test]
async fn reasoning_ends_at_its_budget_but_not_within_a_character() {
    let app = toy();
    for budget in 1..=5 {
        let request = shaped(&json!({
            "response_format": in_schema(&json!({"enum": ["red"]})), "tools": [], "temperature": 0,
            "chat_template_kwargs": {}, "thinking_token_budget": budget,
            // `<think>`, then a character of four bytes after the other.
            "logit_bias": {"256": 100, "240": 60},
        }));
        let answer = ask(&app, CHAT, &request).await;
        assert_eq!(answer.status, 200, "{}", answer.text);
        let answer = answer.json();
        let message = &answer["choices"][0]["message"];
        assert_eq!(message["content"], "\"red\"", "{answer}");
        let reasoning = message["reasoning_content"].as_str().unwrap();
        assert!(
            !reasoning.is_empty() && !reasoning.contains('\u{fffd}'),
            "{answer}"
        );
        assert!(reasoning.len() <= budget + 3, "{answer}");
    }
}

#[tokio::test]
async fn a_schema_that_is_too_much_work_shows_it_while_an_answer_is_written() {
    let app = toy();
    // So many ways on behind the bracket are more than are followed at a time.
    let object = |at: usize| {
        let name = format!("a{at}");
        json!({"type": "object", "properties": {name.as_str(): {}}, "required": [name]})
    };
    let objects: Vec<Value> = (0..2100).map(object).collect();
    let schema = json!({"type": "array", "items": {"anyOf": objects}, "minItems": 1});
    let fields = json!({
        "response_format": in_schema(&schema), "tools": [], "temperature": 1.0, "seed": 1,
    });
    let error = ask(&app, CHAT, &shaped(&fields)).await.error(400);
    assert_eq!(error["param"], "response_format", "{error}");
    let mut streamed = shaped(&fields);
    streamed["stream"] = json!(true);
    let answer = ask(&app, CHAT, &streamed).await;
    let last = answer.text.trim_end().rsplit("data: ").next().unwrap();
    let last: Value = serde_json::from_str(last).unwrap();
    assert_eq!(last["error"]["param"], "response_format", "{last}");
}

#[tokio::test]
async fn what_a_guide_forbids_is_not_among_the_likeliest_tokens() {
    let app = toy();
    let request = shaped(&json!({
        "response_format": in_schema(&json!({"enum": ["red", "green"]})), "tools": [], "logprobs": true,
        "top_logprobs": 5, "top_k": 10,
    }));
    let answer = ask(&app, CHAT, &request).await.json();
    for token in answer["choices"][0]["logprobs"]["content"]
        .as_array()
        .unwrap()
    {
        let likeliest = token["top_logprobs"].as_array().unwrap();
        assert!(likeliest.len() < 5, "{token}");
        assert!(
            likeliest.iter().all(|top| top["logprob"].is_f64()),
            "{token}"
        );
    }
}

#[tokio::test]
async fn what_a_guide_forbids_has_no_probability() {
    let app = toy();
    let format = json!({"type": "json_schema", "json_schema": {"schema": {"const": "yes"}}});
    let request = shaped(&json!({
        "response_format": format, "tools": [], "logprobs": true, "top_logprobs": 5, "temperature": 0,
    }));
    let answer = ask(&app, CHAT, &request).await.json();
    assert_eq!(answer["choices"][0]["message"]["content"], "\"yes\"");
    for token in answer["choices"][0]["logprobs"]["content"]
        .as_array()
        .unwrap()
    {
        // One token at each place, so its probability is 1 and there is no other.
        assert_eq!(token["logprob"], 0.0, "{token}");
        assert_eq!(
            token["top_logprobs"].as_array().unwrap().len(),
            1,
            "{token}"
        );
    }
}

#[tokio::test]
async fn guided_and_free_requests_run_side_by_side() {
    let app = toy();
    let free = chat(&json!({"seed": 5, "temperature": 1.0}));
    let alone = ask(&app, CHAT, &free).await.json();
    let format = json!({"type": "json_object"});
    let guided = shaped(&json!({"response_format": format, "tools": [], "seed": 1, "n": 3}));
    let (guided, beside) = tokio::join!(ask(&app, CHAT, &guided), ask(&app, CHAT, &free));
    assert_eq!(beside.json()["choices"], alone["choices"]);
    for choice in guided.json()["choices"].as_array().unwrap() {
        assert!(
            choice["message"]["content"]
                .as_str()
                .unwrap()
                .starts_with('{'),
            "{choice}"
        );
    }
}

#[tokio::test]
async fn the_bytes_of_tokens_make_the_text_also_where_a_character_is_split() {
    let app = toy();
    let request =
        chat(&json!({"logprobs": true, "return_token_ids": true, "seed": 2, "temperature": 1.0}));
    let answer = ask(&app, CHAT, &request).await.json();
    let choice = &answer["choices"][0];
    let ids = choice["token_ids"].as_array().unwrap();
    let entries = choice["logprobs"]["content"].as_array().unwrap();
    let mut split = 0;
    for (id, entry) in ids.iter().zip(entries) {
        let id = id.as_u64().unwrap();
        if id < 256 {
            assert_eq!(entry["bytes"], json!([id]), "{entry}");
            split += usize::from(id >= 0x80);
        } else {
            assert_eq!(
                entry["bytes"],
                json!(
                    model()
                        .tokenizer
                        .decode(&[u32::try_from(id).unwrap()])
                        .unwrap()
                        .as_bytes()
                )
            );
        }
    }
    assert!(split > 0, "no character was split: {answer}");
}
