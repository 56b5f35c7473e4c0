//! What scenarios of the test machine look for in the agent's log has to be there: the gate runs few of them, and one that looks
//! for an absence does not fail.

use std::fs;
use std::path::Path;

use super::rust_files;

/// The texts that commands of the machine scenarios look for in the agent's log.
fn looked_for(text: &str) -> Vec<String> {
    let mut all = Vec::new();
    // A string may go on in the next line.
    let lines = text.lines().map(|line| line.trim().trim_end_matches('\\'));
    let text: String = lines.collect();
    for command in text.split("journalctl -u holdfast").skip(1) {
        let end = command.find(['"', ';']).unwrap_or(command.len());
        for grep in command[..end].split("grep ").skip(1) {
            let options = grep
                .split_inclusive(' ')
                .take_while(|word| word.starts_with('-'));
            let pattern = &grep[options.map(str::len).sum()..];
            let pattern = match pattern.strip_prefix('\'') {
                Some(quoted) => quoted.split('\'').next(),
                None => pattern.split(' ').next(),
            };
            let pieces = pattern.unwrap_or_default().split('|');
            let pieces = pieces.flat_map(|one| one.split(".*"));
            all.extend(pieces.map(|piece| piece.trim().to_owned()));
        }
    }
    all
}

fn sources(dir: &str) -> Vec<String> {
    let files = rust_files(&Path::new(env!("CARGO_MANIFEST_DIR")).join(dir));
    let texts = files.iter().map(fs::read_to_string);
    texts.map(Result::unwrap).collect()
}

#[test]
fn machines_look_for_log_messages_that_the_agent_has() {
    // No messages: levels, names of files and of modules.
    let others = [
        "WARN",
        "level=warn",
        "config.yaml",
        "/var/lib/kubelet",
        "holdfast::images",
    ];
    let agent = sources("src");
    let scenarios = sources("tests/machine");
    let texts: Vec<String> = scenarios.iter().flat_map(|text| looked_for(text)).collect();
    assert!(texts.len() >= 17, "{texts:?}");
    for text in texts.iter().filter(|text| !others.contains(&text.as_str())) {
        assert!(
            agent.iter().any(|source| source.contains(text)),
            "no message of the agent contains {text:?}"
        );
    }
}
