//! `holdfast dump`: asks a live agent, or else reads a copy of its store.

mod history;
mod table;

use std::path::Path;

use anyhow::Context;
use clap::{Args, ValueEnum};
use futures::StreamExt;
use serde::Serialize;

use super::output::{self, Grid, note, print};
use super::{CliError, StateDir, offline};
use crate::admin::client::{Client, ClientError};
use crate::admin::view::{self, Change, ChangeType, Dump, Query, QueryError, Row, Selector, View};
use crate::store::verify;

pub(super) const LONG_HELP: &str = "\
Shows the state that the agent stores. Asks the live agent through its local socket (root only); if none runs, reads a \
copy of the store, and never changes the store. stderr names the source; stdout is the same for both.

Each argument is a table, or a pod as UID prefix, name, or namespace/name. Tables: overview, node, events, devices, claims, \
pressure, shutdown, meta, pods, mirrors, admissions, workers, queue, containers, pleg, statuses, probes, volumes, images, objects, signals, \
journal, sources, cpus, memory, cpusets; `all` stands for all but the first seven, which are derived from the others. \
Without a table: an overview; every table about it when a pod is named; every table with -o json \
or yaml. To select a pod that has the name of a table, give its namespace too.";

const EXAMPLES: &str = "\
Examples:
  holdfast dump                            one line per pod
  holdfast dump default/web                everything about one pod
  holdfast dump workers queue -n default   two tables, one namespace
  holdfast dump containers -o json | jq '.tables.containers[] | {name, container, restartCount}'
  holdfast dump --history default/web      decisions with times and reasons, across restarts
  holdfast dump journal --watch            changes as they happen
  holdfast dump pressure                   resource pressure, and evictions with their reasons

Tables: overview, node, events, devices, claims, pressure, shutdown, meta, pods, mirrors, admissions, workers, queue,
containers, pleg, statuses, probes, volumes, images, objects, signals, journal, sources, cpus, memory, cpusets; `all` is all
but the first seven.

Exit codes: 0 success, 1 failure, 2 wrong usage, 3 no such pod.";

#[derive(Clone, Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(super) struct DumpArgs {
    /// Tables (see below), and at most one pod
    #[arg(value_name = "TABLE|POD")]
    what: Vec<String>,
    /// Only pods of this namespace
    #[arg(short, long)]
    namespace: Option<String>,
    /// Only pods of this name
    #[arg(long)]
    name: Option<String>,
    /// Only the pod with this UID, or a prefix of it
    #[arg(long)]
    uid: Option<String>,
    /// Only pods in this phase
    #[arg(long, value_parser = ["Pending", "Running", "Succeeded", "Failed", "Unknown"])]
    phase: Option<String>,
    /// Show the journal of a pod: decisions with times and reasons, a line at each restart of the agent, and a
    /// summary of its containers
    #[arg(long, value_name = "POD", conflicts_with_all = ["what", "namespace", "name", "uid", "phase", "watch"])]
    history: Option<String>,
    /// Continue with changes as they are published; needs a live agent
    #[arg(short, long)]
    watch: bool,
    /// Output format
    #[arg(short, long, value_name = "FORMAT", default_value = "table")]
    output: Format,
    /// Do not print the source of the output on stderr
    #[arg(short, long)]
    quiet: bool,
    #[command(flatten)]
    state_dir: StateDir,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Format {
    /// For humans
    Table,
    /// For humans, with more columns
    Wide,
    /// Documented and stable; with --watch one object per line
    Json,
    /// As json
    Yaml,
    /// namespace/name of pods, table/key of anything else
    Name,
}

impl Format {
    fn is_table(self) -> bool {
        matches!(self, Self::Table | Self::Wide)
    }
}

pub(super) async fn run(args: DumpArgs) -> anyhow::Result<()> {
    if let Some(pod) = &args.history {
        return history(&args, pod).await;
    }
    let query = query(&args)?;
    if args.watch {
        return watch(&args, &query).await;
    }
    let dump = match connect(&args).await? {
        Source::Live(client) => client.dump(&query).await.map_err(client_error)?,
        Source::Copy(source) => {
            let copy = read_copy(&args, &source)?;
            view::dump(&copy.state, copy.quarantined, &query).map_err(query_error)?
        }
    };
    show(&args, &query, &dump)
}

fn dir(args: &DumpArgs) -> &Path {
    &args.state_dir.state_dir
}

fn query(args: &DumpArgs) -> anyhow::Result<Query> {
    let mut views = Vec::new();
    let mut pod = None;
    for word in args.what.iter().flat_map(|what| what.split(',')) {
        if word == "all" {
            views.extend(View::all());
        } else if let Ok(view) = word.parse() {
            views.push(view);
        } else if let Some(first) = pod.replace(word.to_owned()) {
            let message = QueryError::NoTable { name: word.into() };
            return Err(CliError::Usage(format!(
                "{message}; it cannot be a pod, since {first:?} is already one"
            ))
            .into());
        }
    }
    let mut seen = Vec::new();
    views.retain(|view| {
        !seen.contains(view) && {
            seen.push(*view);
            true
        }
    });
    if views.is_empty() {
        views = match args.output {
            Format::Json | Format::Yaml => View::all(),
            _ if pod.is_some() && args.output.is_table() && !args.watch => {
                let mut all = vec![View::Overview];
                all.extend(View::all().into_iter().filter(|v| v.is_about_pods()));
                all
            }
            _ => vec![View::Overview],
        };
    }
    Ok(Query {
        views,
        selector: Selector {
            pod,
            namespace: args.namespace.clone(),
            name: args.name.clone(),
            uid: args.uid.clone(),
            phase: args.phase.clone(),
        },
    })
}

/// Source of the output.
enum Source {
    Live(Client),
    /// The store itself, for lack of an agent that answers; with the message about it.
    Copy(String),
}

fn tell(args: &DumpArgs, text: impl std::fmt::Display) {
    if !args.quiet {
        note(text);
    }
}

/// Returns the live agent, and prints that on stderr, or else its store.
async fn connect(args: &DumpArgs) -> anyhow::Result<Source> {
    let found = async {
        let client = Client::connect(dir(args)).await?;
        let info = client.info().await?;
        Ok((client, info))
    };
    let here = dir(args).display();
    match found.await {
        Ok((client, info)) => {
            let text = format_args!(
                "source: live agent (pid {}, generation {})",
                info.pid, info.generation
            );
            tell(args, text);
            if let Some(trouble) = &info.credentials {
                tell(
                    args,
                    format_args!("credentials: {}", output::printable(trouble)),
                );
            }
            Ok(Source::Live(client))
        }
        Err(ClientError::NotRunning { .. }) => Ok(Source::Copy(format!(
            "source: copy of the store in {here} (no agent runs)"
        ))),
        Err(error @ (ClientError::Hangs { .. } | ClientError::Broken { .. })) => {
            note(format_args!("{:#}", anyhow::Error::new(error)));
            Ok(Source::Copy(format!(
                "source: copy of the store in {here}; changes that the agent has not written yet are missing"
            )))
        }
        Err(error) => Err(client_error(error)),
    }
}

/// Reads a copy of the store. Prints the source once it is known to exist.
fn read_copy(args: &DumpArgs, source: &str) -> anyhow::Result<offline::Copy> {
    verify::present(dir(args))?;
    tell(args, source);
    offline::read_copy(dir(args))
}

fn client_error(error: ClientError) -> anyhow::Error {
    match error {
        ClientError::NotFound { message } => CliError::NotFound(message).into(),
        other => other.into(),
    }
}

fn query_error(error: QueryError) -> anyhow::Error {
    match error {
        QueryError::NotFound { .. } => CliError::NotFound(error.to_string()).into(),
        other => other.into(),
    }
}

fn show(args: &DumpArgs, query: &Query, dump: &Dump) -> anyhow::Result<()> {
    match args.output {
        Format::Json => print(&format!("{}\n", serde_json::to_string_pretty(dump)?)),
        Format::Yaml => print(&to_yaml(dump)?),
        Format::Name => {
            let rows = query
                .views
                .iter()
                .flat_map(|v| dump.rows(*v).map(|r| (*v, r)));
            let lines: String = rows.map(|(view, row)| name_of(view.name(), row)).collect();
            print(&lines)
        }
        Format::Table | Format::Wide => show_tables(args, query, dump),
    }
}

fn show_tables(args: &DumpArgs, query: &Query, dump: &Dump) -> anyhow::Result<()> {
    let wide = args.output == Format::Wide;
    let now = table::now();
    let one = query.views.len() == 1;
    let mut text = String::new();
    for view in &query.views {
        let rows: Vec<_> = dump.rows(*view).collect();
        if rows.is_empty() {
            continue;
        }
        if !one {
            if !text.is_empty() {
                text.push('\n');
            }
            text.push_str(&format!("{view}:\n"));
        }
        let columns = table::columns(*view, wide);
        let mut grid = vec![table::headers(&columns)];
        grid.extend(rows.iter().map(|row| table::cells(&columns, row, now)));
        text.push_str(&Grid::default().lines(&grid));
    }
    if text.is_empty() && !args.quiet {
        note("nothing found");
    }
    if !dump.quarantined.is_empty() {
        if !text.is_empty() {
            text.push('\n');
        }
        text.push_str("quarantined (records that cannot be read):\n");
        let mut grid = vec![
            ["TABLE", "KEY", "BYTES", "REASON"]
                .map(str::to_owned)
                .to_vec(),
        ];
        grid.extend(dump.quarantined.iter().map(|q| {
            let (key, reason) = (output::printable(&q.key), output::printable(&q.reason));
            vec![q.table.clone(), key, q.bytes.to_string(), reason]
        }));
        text.push_str(&Grid::default().lines(&grid));
    }
    print(&text)
}

/// `namespace/name` of a pod, `table/key` of anything else, and a line end.
fn name_of(view: &str, row: &Row) -> String {
    let text = |field: &str| row.get(field).and_then(serde_json::Value::as_str);
    let name = match (view, text("namespace"), text("name")) {
        ("pods" | "overview", Some(namespace), Some(name)) => format!("{namespace}/{name}"),
        _ => format!("{view}/{}", text("key").unwrap_or_default()),
    };
    format!("{}\n", output::printable(&name))
}

fn to_yaml(value: &impl Serialize) -> anyhow::Result<String> {
    serde_saphyr::to_string(value).context("encode as YAML")
}

async fn history(args: &DumpArgs, pod: &str) -> anyhow::Result<()> {
    let history = match connect(args).await? {
        Source::Live(client) => client.history(pod).await.map_err(client_error)?,
        Source::Copy(source) => {
            view::history(&read_copy(args, &source)?.state, pod).map_err(query_error)?
        }
    };
    match args.output {
        Format::Json => print(&format!("{}\n", serde_json::to_string_pretty(&history)?)),
        Format::Yaml => print(&to_yaml(&history)?),
        Format::Table | Format::Wide => {
            print(&history::lines(&history, args.output == Format::Wide))
        }
        Format::Name => {
            Err(CliError::Usage("--history has no -o name; choose another format".into()).into())
        }
    }
}

async fn watch(args: &DumpArgs, query: &Query) -> anyhow::Result<()> {
    if args.output.is_table() && query.views.len() != 1 {
        let message = "--watch shows one table; name one, or use -o json for several";
        return Err(CliError::Usage(message.into()).into());
    }
    let Source::Live(client) = connect(args).await? else {
        anyhow::bail!(
            "--watch needs a live agent, and none listens in {}",
            dir(args).display()
        );
    };
    let mut pieces = client.watch(query).await.map_err(client_error)?.pieces();
    let mut shown = WatchedTable::new(args, query);
    let mut buffer: Vec<u8> = Vec::new();
    while let Some(piece) = pieces.next().await {
        buffer.extend_from_slice(&piece.context("read from the agent")?);
        let Some(end) = buffer.iter().rposition(|b| *b == b'\n') else {
            continue;
        };
        let rest = buffer.split_off(end + 1);
        let lines = std::mem::replace(&mut buffer, rest);
        if args.output == Format::Json {
            output::print_bytes(&lines)?;
            continue;
        }
        for line in lines.split(|b| *b == b'\n').filter(|line| !line.is_empty()) {
            let change: Change = serde_json::from_slice(line).context("read a change")?;
            match args.output {
                Format::Yaml => print(&format!("---\n{}", to_yaml(&change)?))?,
                Format::Name if change.change == ChangeType::Bookmark => {}
                Format::Name => print(&name_of(&change.table, &change.row))?,
                _ => shown.take(change)?,
            }
        }
    }
    anyhow::bail!("the agent has exited")
}

/// Collects what is there at first, so that columns get their width, then prints line by line.
struct WatchedTable {
    columns: Vec<table::Column>,
    grid: Grid,
    first: Option<Vec<Vec<String>>>,
}

impl WatchedTable {
    fn new(args: &DumpArgs, query: &Query) -> Self {
        let view = query.views.first().copied().unwrap_or(View::Overview);
        let columns = table::columns(view, args.output == Format::Wide);
        let mut headers = vec!["EVENT".to_owned()];
        headers.extend(table::headers(&columns));
        Self {
            columns,
            grid: Grid::default(),
            first: Some(vec![headers]),
        }
    }

    fn take(&mut self, change: Change) -> anyhow::Result<()> {
        let event = match change.change {
            ChangeType::Added => "ADDED",
            ChangeType::Modified => "MODIFIED",
            ChangeType::Deleted => "DELETED",
            ChangeType::Bookmark => {
                let rows = self.first.take().unwrap_or_default();
                return print(&self.grid.lines(&rows));
            }
        };
        let mut cells = vec![event.to_owned()];
        cells.extend(table::cells(&self.columns, &change.row, table::now()));
        match &mut self.first {
            Some(rows) => rows.push(cells),
            None => print(&self.grid.lines(&[cells]))?,
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn help_lists_every_table() {
        let listed = EXAMPLES.split_once("Tables: ").unwrap().1;
        let listed = listed.split_once(';').unwrap().0;
        let listed: Vec<View> = listed
            .split(", ")
            .flat_map(|l| l.split(",\n"))
            .map(|name| name.parse().unwrap())
            .collect();
        let first = [
            View::Overview,
            View::Node,
            View::Events,
            View::Devices,
            View::Claims,
            View::Pressure,
            View::Shutdown,
        ];
        let all: Vec<View> = first.into_iter().chain(View::all()).collect();
        assert_eq!(listed, all);
    }
}
