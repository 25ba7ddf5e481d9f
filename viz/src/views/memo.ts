import { Component, h, type ComponentType } from "preact";

/** A component that renders again only when one of its properties changes. */
export function memo<P extends object>(Inner: (props: P) => preact.ComponentChild): ComponentType<P> {
  return class extends Component<P> {
    override shouldComponentUpdate(next: P): boolean {
      const names = Object.keys(next) as (keyof P)[];
      return names.length !== Object.keys(this.props).length - ("children" in this.props ? 1 : 0)
        ? true
        : names.some((name) => next[name] !== (this.props as P)[name]);
    }
    override render() {
      return h(Inner as ComponentType<P>, this.props as P);
    }
  };
}
