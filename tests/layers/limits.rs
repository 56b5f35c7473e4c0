//! Limits of functions outside of tests: at most [`LINES`] lines from signature to closing brace, and at most
//! [`PARAMETERS`] parameters without `self`.

use std::fs;
use std::path::Path;

use super::{Token, is_for_tests, rust_files, tokens, without_tests};

const LINES: usize = 100;
const PARAMETERS: usize = 6;

/// Functions above a limit: file, function, the number that it may have, the reason. The list only shrinks: an entry that
/// is not needed any more, or whose number is too high, fails the test.
const LONG: &[(&str, &str, usize, &str)] = &[];
const MANY_PARAMETERS: &[(&str, &str, usize, &str)] = &[(
    "src/core/node_status.rs",
    "compute",
    7,
    "it is pure, so all that the status of a node depends on is a parameter",
)];

#[derive(Debug, PartialEq, Eq)]
struct Function<'a> {
    name: &'a str,
    line: usize,
    lines: usize,
    parameters: usize,
}

/// The functions of a source that have a body or are declared in a trait.
fn functions(source: &str) -> Vec<Function<'_>> {
    let tokens = without_tests(&tokens(source));
    let mut found = Vec::new();
    for at in 0..tokens.len() {
        let [keyword, name, ..] = &tokens[at..] else {
            break;
        };
        let is_name = name
            .text
            .starts_with(|c: char| c.is_alphabetic() || c == '_');
        if keyword.text != "fn" || !is_name {
            continue;
        }
        let mut next = at + 2;
        if text(&tokens, next) == "<" {
            next = end_of_generics(&tokens, next);
        }
        if text(&tokens, next) != "(" {
            continue;
        }
        let (parameters, end) = parameters(&tokens, next);
        let Some(end) = end_of_function(&tokens, end) else {
            continue;
        };
        found.push(Function {
            name: name.text,
            line: keyword.line,
            lines: tokens[end].line - keyword.line + 1,
            parameters,
        });
    }
    found
}

fn text<'a>(tokens: &[Token<'a>], at: usize) -> &'a str {
    tokens.get(at).map_or("", |token| token.text)
}

/// Returns whether the `>` at an index belongs to `->` or `=>`.
fn is_arrow(tokens: &[Token<'_>], at: usize) -> bool {
    at > 0 && matches!(tokens[at - 1].text, "-" | "=")
}

/// The index after the generics that begin at an index.
fn end_of_generics(tokens: &[Token<'_>], start: usize) -> usize {
    let mut depth = 0;
    for at in start..tokens.len() {
        match tokens[at].text {
            "<" => depth += 1,
            ">" if !is_arrow(tokens, at) => depth -= 1,
            _ => {}
        }
        if depth == 0 {
            return at + 1;
        }
    }
    tokens.len()
}

/// Counts the parameters of a list, without `self`. Returns the index after the list, too.
fn parameters(tokens: &[Token<'_>], start: usize) -> (usize, usize) {
    let (mut count, mut depth, mut words) = (0, 0, Vec::new());
    // `&'a mut self` and `self: Arc<Self>`, too.
    let is_parameter = |words: &[&str]| {
        let pattern = words.iter().take_while(|word| **word != ":");
        pattern.last().is_some_and(|last| *last != "self")
    };
    for at in start..tokens.len() {
        match tokens[at].text {
            "(" | "[" | "{" | "<" => depth += 1,
            ")" | "]" | "}" => depth -= 1,
            ">" if !is_arrow(tokens, at) => depth -= 1,
            "," if depth == 1 => {
                count += usize::from(is_parameter(&words));
                words.clear();
                continue;
            }
            _ => {}
        }
        if depth == 0 {
            count += usize::from(is_parameter(&words));
            return (count, at + 1);
        }
        if at > start {
            words.push(tokens[at].text);
        }
    }
    (count, tokens.len())
}

/// The last token of a function, from the end of its parameters on: its closing brace, or the semicolon of a declaration.
fn end_of_function(tokens: &[Token<'_>], start: usize) -> Option<usize> {
    let (mut depth, mut is_body) = (0, false);
    for (at, token) in tokens.iter().enumerate().skip(start) {
        match token.text {
            "{" if depth == 0 => (depth, is_body) = (1, true),
            "(" | "[" | "{" => depth += 1,
            ")" | "]" | "}" => depth -= 1,
            ";" if depth == 0 => return Some(at),
            _ => {}
        }
        if is_body && depth == 0 {
            return Some(at);
        }
    }
    None
}

/// What is wrong with the sizes of functions, where each exception of `allowed` may have its own number.
fn problems(
    what: &str,
    limit: usize,
    found: &[(String, usize)],
    allowed: &[(&str, &str, usize, &str)],
) -> Vec<String> {
    let above = found.iter().filter(|(_, size)| *size > limit);
    let mut problems: Vec<String> = above
        .filter(|(name, size)| {
            let mut allowed = allowed.iter();
            !allowed.any(|(file, function, most, _)| {
                *name == format!("{file}: {function}") && size == most
            })
        })
        .map(|(name, size)| format!("{name} has {size} {what}, {limit} are allowed"))
        .collect();
    for (file, function, most, _) in allowed {
        let name = format!("{file}: {function}");
        if !found.iter().any(|(n, size)| *n == name && size == most) || *most <= limit {
            problems.push(format!(
                "the exception {name} of {most} {what} is not needed"
            ));
        }
    }
    problems
}

#[test]
fn functions_are_short_and_have_few_parameters() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let src = root.join("src");
    let (mut lines, mut parameters) = (Vec::new(), Vec::new());
    for path in rust_files(&src) {
        if is_for_tests(path.strip_prefix(&src).unwrap()) {
            continue;
        }
        let file = path.strip_prefix(root).unwrap().display();
        let source = fs::read_to_string(&path).unwrap();
        for function in functions(&source) {
            let name = format!("{file}: {}", function.name);
            lines.push((name.clone(), function.lines));
            parameters.push((name, function.parameters));
        }
    }
    assert!(lines.len() > 5_000, "found only {} functions", lines.len());
    let mut found = problems("lines", LINES, &lines, LONG);
    let many = problems("parameters", PARAMETERS, &parameters, MANY_PARAMETERS);
    found.extend(many);
    assert!(found.is_empty(), "\n{}", found.join("\n"));
}

#[test]
fn sizes_of_functions_are_counted() {
    for (source, parameters, lines) in [
        ("fn f() {}", 0, 1),
        ("fn f(a: A, b: B) -> C {\n}\n", 2, 2),
        (
            "async fn f(\n    &'a mut self,\n    a: Map<K, V>,\n) {\n}",
            1,
            5,
        ),
        ("fn f<T: Fn(A) -> B, U>(a: T, (b, c): (U, U),) {}", 2, 1),
        (
            "fn f(a: impl Fn(A, B) -> Map<K, V>, b: [u8; 2]) where A: B {\n\n}",
            2,
            3,
        ),
        ("trait T { fn f(self, a: A) -> [u8; 2]; }", 1, 1),
        ("fn f(a: A) { // (\n\"}\"; '}'; { }\n}", 1, 3),
        ("const F: fn(A, B) = g; fn f(a: fn(A, B)) {}", 1, 1),
        ("fn f() {\nmatch a {\n#[cfg(test)]\nA => {}\n}\n}", 0, 6),
    ] {
        let found = functions(source);
        assert_eq!(found.len(), 1, "{source}: {found:?}");
        let sizes = (found[0].parameters, found[0].lines);
        assert_eq!(sizes, (parameters, lines), "{source}");
    }
    let nested =
        functions("fn f() {\n    fn g() {\n    }\n}\n#[cfg(test)]\nmod tests { fn h() {} }");
    let nested: Vec<_> = nested.iter().map(|f| (f.name, f.line, f.lines)).collect();
    assert_eq!(nested, [("f", 1, 4), ("g", 2, 2)]);
}

#[test]
fn exceptions_only_shrink() {
    let found = [
        ("a.rs: long".to_owned(), 120),
        ("a.rs: short".to_owned(), 9),
    ];
    let of = |allowed: &[(&str, &str, usize, &str)]| problems("lines", 100, &found, allowed);
    assert!(of(&[("a.rs", "long", 120, "")]).is_empty());
    assert_eq!(of(&[]), ["a.rs: long has 120 lines, 100 are allowed"]);
    let grown = of(&[("a.rs", "long", 119, "")]);
    let unused = "the exception a.rs: long of 119 lines is not needed";
    assert_eq!(grown, ["a.rs: long has 120 lines, 100 are allowed", unused]);
    let shrunk = of(&[("a.rs", "long", 120, ""), ("a.rs", "short", 9, "")]);
    assert_eq!(
        shrunk,
        ["the exception a.rs: short of 9 lines is not needed"]
    );
}
