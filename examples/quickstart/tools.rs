//! The tools of the quickstart: one that is managed, and functions.

use std::collections::HashMap;
use std::error::Error;
use std::path::Path;
use std::sync::Arc;
use std::{fs, io};

use schemars::JsonSchema;
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::sync::RwLock;
use tokio::task::spawn_blocking;
use toolscope::{
    ActivationContext, DeactivationContext, Tool, ToolCapability, ToolDescriptor,
    ToolExecutionContext, ToolFailure, ToolInstance, ToolOutput, ToolRuntime, ToolSpec,
    async_trait,
};

#[derive(Deserialize, JsonSchema)]
struct Nothing {}

#[derive(Deserialize, JsonSchema)]
struct Text {
    text: String,
}

/// A runtime whose tools know the folder.
pub(crate) async fn runtime(folder: &Arc<Path>) -> Result<ToolRuntime, Box<dyn Error>> {
    let reader = |name, does: &str| ToolSpec::new(name).description(does).read_only();
    let count = reader("count", "Counts files, lines, words and bytes")
        .handler_with(Arc::clone(folder), async |folder, _, _: Nothing| {
            Ok(spawn_blocking(move || count(&folder)).await??)
        });
    let search = reader("search", "Counts the lines that hold a text").handler_with(
        Arc::clone(folder),
        async |folder, _, args: Text| {
            Ok(spawn_blocking(move || search(&folder, &args.text)).await??)
        },
    );
    let wait =
        reader("wait", "Waits for ever").handler(async |ctx: ToolExecutionContext, _: Nothing| {
            ctx.cancelled().await;
            Ok(ctx.check()?)
        });
    let explode = reader("explode", "Panics").function(explode);
    let note = ToolSpec::new("note")
        .description("Takes a note")
        .writes()
        .function(|note: Text| Ok(note.text));
    let index = WordIndex {
        descriptor: ToolDescriptor::new("word-index".parse()?)
            .description("Says how often a word occurs")
            .capability(ToolCapability::read_only()),
        folder: Arc::clone(folder),
    };
    let functions =
        ToolRuntime::builder().tool(count).tool(search).tool(wait).tool(explode).tool(note);
    Ok(functions.tool(index).build().await?)
}

fn explode(_: Nothing) -> Result<(), ToolFailure> {
    panic!("a bug in a tool")
}

/// A managed tool: it reads the folder when it is activated, once per plan.
struct WordIndex {
    descriptor: ToolDescriptor,
    folder: Arc<Path>,
}

/// What an activation makes: how often each word occurs.
struct Index(RwLock<HashMap<String, u64>>);

#[async_trait]
impl Tool for WordIndex {
    fn descriptor(&self) -> &ToolDescriptor {
        &self.descriptor
    }

    async fn activate(&self, _: &ActivationContext) -> Result<Arc<dyn ToolInstance>, ToolFailure> {
        let folder = Arc::clone(&self.folder);
        let words = spawn_blocking(move || index(&folder)).await??;
        Ok(Arc::new(Index(RwLock::new(words))))
    }
}

#[async_trait]
impl ToolInstance for Index {
    async fn execute(
        &self,
        _: &ToolExecutionContext,
        input: &Value,
    ) -> Result<ToolOutput, ToolFailure> {
        let word = input["word"].as_str().unwrap_or_default();
        let times = self.0.read().await.get(word).copied().unwrap_or(0);
        Ok(json!({"word": word, "times": times}).into())
    }

    async fn deactivate(&self, _: &DeactivationContext) -> Result<(), ToolFailure> {
        self.0.write().await.clear();
        Ok(())
    }
}

// ===== the folder =====

fn count(folder: &Path) -> io::Result<Value> {
    let contents = read(folder)?;
    let sum = |of: fn(&[u8]) -> usize| contents.iter().map(|file| of(file)).sum::<usize>();
    Ok(json!({
        "files": contents.len(),
        "lines": sum(|file| file.split(|byte| *byte == b'\n').count() - 1),
        "words": sum(|file| words(file).count()),
        "bytes": sum(<[u8]>::len),
    }))
}

fn search(folder: &Path, text: &str) -> io::Result<usize> {
    let lines = |file: &Vec<u8>| {
        String::from_utf8_lossy(file).lines().filter(|line| line.contains(text)).count()
    };
    Ok(read(folder)?.iter().map(lines).sum())
}

fn index(folder: &Path) -> io::Result<HashMap<String, u64>> {
    let mut index = HashMap::new();
    for word in read(folder)?.iter().flat_map(|file| words(file)) {
        *index.entry(String::from_utf8_lossy(word).into_owned()).or_default() += 1;
    }
    Ok(index)
}

/// The runs of bytes between ASCII white space.
fn words(file: &[u8]) -> impl Iterator<Item = &[u8]> {
    file.split(|byte| matches!(byte, b'\t'..=b'\r' | b' ')).filter(|word| !word.is_empty())
}

/// The contents of all files under a path. Links are not followed.
fn read(path: &Path) -> io::Result<Vec<Vec<u8>>> {
    let kind = path.symlink_metadata()?.file_type();
    let mut contents = Vec::new();
    if kind.is_file() {
        contents.push(fs::read(path)?);
    } else if kind.is_dir() {
        for entry in path.read_dir()? {
            contents.append(&mut read(&entry?.path())?);
        }
    }
    Ok(contents)
}
