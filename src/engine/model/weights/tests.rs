use candle_core::{DType, Device, Tensor};
use rstest::rstest;

use super::super::tests_support::toy;
use crate::engine::model::{
    ModelConfig, ModelType, load_weights, random_weights, read_safetensors, write_safetensors,
};

/// Writes the toy's weights as two shards, and their index.
fn write_shards(folder: &std::path::Path, config: &ModelConfig, dtype: DType) {
    let mut weights: Vec<_> = (random_weights(config, 3, dtype, &Device::Cpu).unwrap())
        .into_iter()
        .collect();
    weights.sort_by(|a, b| a.0.cmp(&b.0));
    let mut map = serde_json::Map::new();
    for (index, part) in weights.chunks(weights.len() / 2 + 1).enumerate() {
        let shard = format!("model-0000{}-of-00002.safetensors", index + 1);
        write_safetensors(&folder.join(&shard), part).unwrap();
        for (name, _) in part {
            map.insert(name.clone(), shard.clone().into());
        }
    }
    write_index(folder, &map);
}

fn write_index(folder: &std::path::Path, map: &serde_json::Map<String, serde_json::Value>) {
    let index = serde_json::json!({"metadata": {"total_size": 0}, "weight_map": map});
    let path = folder.join("model.safetensors.index.json");
    fs_err::write(path, index.to_string()).unwrap();
}

#[rstest]
#[case(DType::F32)]
#[case(DType::F16)]
#[case(DType::BF16)]
fn shards_of_every_type_are_read_as_one_model(#[case] dtype: DType) {
    let folder = tempfile::tempdir().unwrap();
    let config = toy(ModelType::Qwen2);
    write_shards(folder.path(), &config, dtype);
    let found = load_weights(folder.path(), &config, DType::F32, &Device::Cpu).unwrap();
    let expected = random_weights(&config, 3, dtype, &Device::Cpu).unwrap();
    assert_eq!(found.len(), expected.len());
    for (name, expected) in expected {
        let expected = expected
            .to_dtype(DType::F32)
            .unwrap()
            .flatten_all()
            .unwrap();
        let found = found[&name].flatten_all().unwrap();
        let (found, expected) = (found.to_vec1::<f32>(), expected.to_vec1::<f32>());
        assert_eq!(found.unwrap(), expected.unwrap(), "{name}");
    }
}

/// Every fault of a folder of weights is one error, which names the file and the tensor.
#[test]
fn bad_weight_files_are_refused_before_they_are_read() {
    const FIRST: &str = "model-00001-of-00002.safetensors";
    const SECOND: &str = "model-00002-of-00002.safetensors";
    const INDEX: &str = "model.safetensors.index.json";
    let config = toy(ModelType::Qwen3);
    type Damage = fn(&std::path::Path);
    fn edit_index(folder: &std::path::Path, edit: fn(&mut serde_json::Value)) {
        let path = folder.join(INDEX);
        let mut index = serde_json::from_slice(&fs_err::read(&path).unwrap()).unwrap();
        edit(&mut index);
        fs_err::write(path, index.to_string()).unwrap();
    }
    /// Replaces the tensors of the second shard and, in the index, what is changed of their names.
    fn edit_shard(folder: &std::path::Path, edit: fn(&mut Vec<(String, Tensor)>)) {
        let path = folder.join(SECOND);
        let mut tensors = read_safetensors(&path, DType::F32, &Device::Cpu).unwrap();
        edit(&mut tensors);
        write_safetensors(&path, &tensors).unwrap();
        let path = folder.join(INDEX);
        let mut index: serde_json::Value =
            serde_json::from_slice(&fs_err::read(&path).unwrap()).unwrap();
        let map = index["weight_map"].as_object_mut().unwrap();
        map.retain(|_, shard| shard != SECOND);
        for (name, _) in tensors {
            map.insert(name, SECOND.into());
        }
        fs_err::write(path, index.to_string()).unwrap();
    }
    let cases: [(&str, Damage, [&str; 2]); 11] = [
        (
            "missing shard",
            |folder| fs_err::remove_file(folder.join(SECOND)).unwrap(),
            [SECOND, "is the download complete?"],
        ),
        (
            "truncated shard",
            |folder| {
                let bytes = fs_err::read(folder.join(SECOND)).unwrap();
                fs_err::write(folder.join(SECOND), &bytes[..bytes.len() - 1]).unwrap();
            },
            [SECOND, "is the download complete?"],
        ),
        (
            "empty shard",
            |folder| fs_err::write(folder.join(FIRST), "").unwrap(),
            [FIRST, "is the download complete?"],
        ),
        (
            "no index",
            |folder| fs_err::write(folder.join(INDEX), "{}").unwrap(),
            [INDEX, "failed to parse"],
        ),
        (
            "a tensor of the index is in no shard",
            |folder| {
                edit_index(folder, |index| {
                    index["weight_map"]["lm_head.weight"] = FIRST.into();
                });
            },
            [FIRST, "`lm_head.weight` is not in the shard"],
        ),
        (
            "a tensor is in two shards",
            |folder| {
                let path = folder.join(FIRST);
                let mut tensors = read_safetensors(&path, DType::F32, &Device::Cpu).unwrap();
                let second = folder.join(SECOND);
                let other = read_safetensors(&second, DType::F32, &Device::Cpu).unwrap();
                tensors.push(other[0].clone());
                write_safetensors(&path, &tensors).unwrap();
            },
            [FIRST, "where the index does not place it"],
        ),
        (
            "missing tensor",
            |folder| edit_shard(folder, |tensors| drop(tensors.remove(0))),
            ["missing tensor", "model.layers."],
        ),
        (
            "unknown tensor",
            |folder| edit_shard(folder, |tensors| tensors[0].0 = "model.lost".to_owned()),
            [SECOND, "unexpected tensor `model.lost`"],
        ),
        (
            "another shape",
            |folder| {
                edit_shard(folder, |tensors| tensors[0].1 = tensors[0].1.t().unwrap());
            },
            [SECOND, "expected ["],
        ),
        (
            "integers",
            |folder| {
                edit_shard(folder, |tensors| {
                    tensors[0].1 = tensors[0].1.to_dtype(DType::U8).unwrap();
                });
            },
            [SECOND, "is of type U8"],
        ),
        (
            "not a number",
            |folder| {
                edit_shard(folder, |tensors| {
                    tensors[0].1 = (&tensors[0].1 * f64::NAN).unwrap();
                });
            },
            [SECOND, "is not finite at element 0"],
        ),
    ];
    for (name, damage, expected) in cases {
        let folder = tempfile::tempdir().unwrap();
        write_shards(folder.path(), &config, DType::F32);
        load_weights(folder.path(), &config, DType::F32, &Device::Cpu).unwrap();
        damage(folder.path());
        let error = load_weights(folder.path(), &config, DType::F32, &Device::Cpu).unwrap_err();
        assert!(error.is_input(), "{name}");
        let message = error.to_string();
        for expected in expected {
            assert!(message.contains(expected), "{name}: {message}");
        }
        assert!(
            message.contains(&*folder.path().to_string_lossy()),
            "{name}: {message}"
        );
    }
}
